"""What trained attention is like: rank, symmetry and patterns of models, by layer and head."""

from qkattn.analysis.analyze import Analysis, analyze, circuit_matrices
from qkattn.analysis.patterns import attention_patterns, walk

__all__ = ['Analysis', 'analyze', 'attention_patterns', 'circuit_matrices', 'walk']
