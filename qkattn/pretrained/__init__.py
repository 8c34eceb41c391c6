"""Published models: parameters read from, and written to, the layouts of GPT-2 and nanoGPT."""

from qkattn.errors import LayoutError
from qkattn.pretrained.gpt2 import load_gpt2, save_gpt2
from qkattn.pretrained.nanogpt import load_nanogpt
from qkattn.pretrained.source import (
    Loaded,
    load,
    load_any,
    load_model,
    settings_of,
    tokenizer_for,
    tokenizer_of_run,
)

__all__ = [
    'LayoutError',
    'Loaded',
    'load',
    'load_any',
    'load_gpt2',
    'load_model',
    'load_nanogpt',
    'save_gpt2',
    'settings_of',
    'tokenizer_for',
    'tokenizer_of_run',
]
