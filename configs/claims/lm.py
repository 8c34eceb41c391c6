"""What is each weight matrix of attention worth to a language model?

Every way to drop, share, merge or limit a matrix, beside one baseline; the arms that save are
trained at its shape, too. One head instead of four and a deeper stack are positive controls.

    python -m experiments.ablate --config=configs/claims/lm.py:cpu \\
        --workdir=runs/lm
"""

from qkattn.claims.protocol import pick, protocol, trained_language_model
from qkattn.config import Study, to_config_dict


def get_config(scale='cpu'):
    tuned = scale != 'smoke'
    return to_config_dict(
        Study(
            name='lm',
            question='What is each weight matrix of attention worth to a language model?',
            base=trained_language_model(scale, evaluations=4),
            variants=(
                'qk/vo',
                'query_free/vo',
                'key_free/vo',
                'shared_qk/vo',
                'merged/vo',
                'low_rank(rank=4)/vo',
                'low_rank(rank=12)/vo',
                'nonlinear_query/vo',
                'qk/no_v',
                'qk/no_o',
                'qk/k_is_v',
                'shared_qk/k_is_v',
                'qk/vo?num_kv_heads=2',
                'qk/vo?num_kv_heads=1',
                'qk/vo?num_heads=1',
                'query_free/vo?num_heads=1',
                'qk/vo?num_layers=4',
            ),
            sizes=pick(scale, smoke=('d_model=48',), cpu=('d_model=96',), gpu=('d_model=768',)),
            # Parameters worth 8 % of the model cost this decoder about 0.021 nats.
            margin=0.01,
            expected=('qk/vo?num_heads=1 is worse', 'qk/vo?num_layers=4 is not worse')
            if tuned
            else (),
            **protocol(scale, equal_shape=True, choice='minimax'),
        )
    )
