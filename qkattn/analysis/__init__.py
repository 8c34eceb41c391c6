"""What trained attention is like: rank, symmetry and patterns of models, by layer and head.

`analyze` measures a model; every quantity is one function on arrays of `matrices` or `patterns`.
"""

from qkattn.analysis.analyze import Analysis, Row, analyze, circuit_matrices, next_token_batch
from qkattn.analysis.means import means
from qkattn.analysis.patterns import Pattern
from qkattn.analysis.watching import attention_patterns, sites, walk

__all__ = [
    'Analysis',
    'Pattern',
    'Row',
    'analyze',
    'attention_patterns',
    'circuit_matrices',
    'means',
    'next_token_batch',
    'sites',
    'walk',
]
