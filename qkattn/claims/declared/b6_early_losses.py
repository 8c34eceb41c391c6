"""B6: losses read early against annealed ones."""

from qkattn.claims.claim import Claim, Measure
from qkattn.claims.measures.curves import flips

CLAIM = Claim(
    name='B6',
    title='losses read early mislead',
    statement='Losses that are read early cannot stand for those of annealed models.',
    source='A forum thread: removing a matrix acts like a lower learning rate.',
    rule='Holds if, at every fraction of the steps, the words of some arms are other than after '
    'annealing, by the same tests on the same seeds; each arm has its own learning rate.',
    measures=(Measure('decoder', flips),),
)
