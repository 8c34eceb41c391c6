"""Decides the claims: runs their checks and studies at a scale, and writes the table of verdicts.

python -m experiments.claims --list
python -m experiments.claims --scale=cpu --workdir=runs/claims --workers=auto    # all; resumes
python -m experiments.claims B2 C1 --scale=cpu --workdir=runs/claims
python -m experiments.claims --scale=gpu --dry_run                               # plan and cost
"""

from absl import flags

from qkattn.claims import catalogue
from qkattn.run import cli

CLAIMS = flags.DEFINE_list('claims', [], 'Names of claims, as in B2,C1; all by default.')
LIST = flags.DEFINE_bool('list', False, 'List the claims, then stop.')


def main() -> None:
    claims = catalogue.chosen(CLAIMS.value)
    if LIST.value:
        for claim in claims:
            print(f'{claim.name:<3} {claim.statement}')


if __name__ == '__main__':
    cli.run(main)
