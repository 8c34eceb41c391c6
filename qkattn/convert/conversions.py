"""The registry of conversions between attention variants.

To add one, write a function `(layer, *, options) -> layer` that raises `ConversionError` where a
precondition does not hold, and add it to `CONVERSIONS`. `experiments.convert --apply=NAME` and
`experiments.variants --conversions` read this table.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

from qkattn.attention.attention import Attention
from qkattn.config.calls import parse_call
from qkattn.convert.folding import fold_biases, fold_double, fold_gains
from qkattn.convert.gauge import gauge_fix_qk, gauge_fix_vo, shared_columns, shared_rows
from qkattn.convert.kv_heads import gqa_to_latent, gqa_to_mha
from qkattn.convert.ov_circuit import merge_vo, truncate_vo, unmerge_vo
from qkattn.convert.qk_circuit import merge, to_collaborative, truncate, unmerge
from qkattn.convert.standard_form import to_standard
from qkattn.convert.symmetric_qk import to_shared, to_symmetric
from qkattn.convert.truncation import Truncation
from qkattn.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Conversion:
    """One conversion of a layer.

    Attributes:
      function: (layer, **options) -> the converted layer, which computes the same function in the
        same dtype; where `lossy`, (layer, **options) -> (layer, Truncation). Options are its
        keyword-only parameters.
      circuit: the circuit that it rewrites.
      lossy: whether it changes the function that the layer computes.
      takes_norm: whether `function` also takes the gain and bias of the norm before attention.
      in_stack: (layers, **options) -> options for each layer of a model, whose layers have to
        remain one variant; None is the options as given.
      example: options with which the catalogue measures a conversion that requires some.
    """

    function: Callable[..., Any]
    circuit: Literal['QK', 'OV', 'both']
    lossy: bool = False
    takes_norm: bool = False
    in_stack: Callable[..., Mapping[str, Any]] | None = None
    example: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(
        self, layer: Attention, *norm: Any, **options: Any
    ) -> tuple[Attention, Truncation | None]:
        """The converted layer, and the error of a lossy conversion."""
        result = self.function(layer, *norm, **options)
        return result if self.lossy else (result, None)

    @property
    def summary(self) -> str:
        """From which variant to which, in one line."""
        first = (inspect.getdoc(self.function) or '').partition('\n')[0]
        return first.removesuffix(' Exact.')

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raises ConfigError for an unknown option or a missing one."""
        name = self.function.__name__
        known = {
            p.name: p.default is p.empty
            for p in inspect.signature(self.function).parameters.values()
            if p.kind is p.KEYWORD_ONLY
        }
        for option in options:
            if option not in known:
                raise ConfigError(
                    f'conversion {name} has no option {option!r}; '
                    f'it takes {", ".join(known) or "none"}'
                )
        for option, required in known.items():
            if required and option not in options:
                raise ConfigError(f'conversion {name} requires the option {option!r}')


CONVERSIONS: dict[str, Conversion] = {
    'to_standard': Conversion(to_standard, 'both'),
    'merge': Conversion(merge, 'QK'),
    'unmerge': Conversion(unmerge, 'QK'),
    'truncate': Conversion(truncate, 'QK', lossy=True, example={'rank': 2}),
    'merge_vo': Conversion(merge_vo, 'OV'),
    'unmerge_vo': Conversion(unmerge_vo, 'OV'),
    'truncate_vo': Conversion(truncate_vo, 'OV', lossy=True, example={'rank': 2}),
    'gauge_fix_qk': Conversion(gauge_fix_qk, 'QK', in_stack=shared_rows),
    'gauge_fix_vo': Conversion(gauge_fix_vo, 'OV', in_stack=shared_columns),
    'to_symmetric': Conversion(to_symmetric, 'QK'),
    'to_shared': Conversion(to_shared, 'QK'),
    'to_collaborative': Conversion(to_collaborative, 'QK'),
    'fold_double': Conversion(fold_double, 'both'),
    'fold_biases': Conversion(fold_biases, 'both'),
    'fold_gains': Conversion(fold_gains, 'both', takes_norm=True),
    'gqa_to_mha': Conversion(gqa_to_mha, 'both'),
    'gqa_to_latent': Conversion(gqa_to_latent, 'both'),
}


def parse_conversion(text: str) -> tuple[Conversion, dict[str, Any]]:
    """The conversion and options that `text` names, e.g. 'merge' or 'truncate(rank=8)'.

    Raises:
      ConfigError: an unknown conversion or option, or a missing option.
    """
    name, options = parse_call(text, 'conversion')
    if name not in CONVERSIONS:
        raise ConfigError(f'unknown conversion {name!r}; known are {", ".join(CONVERSIONS)}')
    CONVERSIONS[name].check_options(options)
    return CONVERSIONS[name], options
