"""Which weight matrices does a causal language model need, once it has learned a text?

Models gain from a context of 128 bytes and beat counts of n-grams; one head instead of four is the
positive control.

    python -m experiments.ablate --config=configs/claims/lm_stdlib.py:cpu \\
        --workdir=runs/lm_stdlib
"""

from qkattn.claims.protocol import pick, protocol, trained_language_model
from qkattn.config import Study, to_config_dict


def get_config(scale='cpu'):
    tuned = scale != 'smoke'
    return to_config_dict(
        Study(
            name='lm_stdlib',
            question='Which weight matrices does a language model need, once it has learned?',
            base=trained_language_model(scale),
            variants=(
                'qk/vo',
                'query_free/vo',
                'shared_qk/vo',
                'qk/no_o',
                'qk/vo?num_heads=1',
            ),
            sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=96',), gpu=('d_model=768',)),
            # Parameters worth 8 % of the model cost this decoder about 0.021 nats.
            margin=0.01,
            expected=('qk/vo?num_heads=1 is worse',) if tuned else (),
            **protocol(scale, equal_shape=False, choice='minimax'),
        )
    )
