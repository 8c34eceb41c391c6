"""B6: losses read early against annealed ones."""

from qkattn.claims.claim import Claim, Measure
from qkattn.claims.measures.curves import early

CLAIM = Claim(
    name='B6',
    title='early differences are not the annealed ones',
    statement='Differences between arms that are read early are not those of annealed models.',
    source='A forum thread: removing a matrix acts like a lower learning rate.',
    rule='Holds if, at every fraction of the steps, the difference of some arm from the baseline '
    'is another than after annealing, by more than the margin, on the same seeds, each arm at its '
    'own learning rate; verdicts that turn stand beside it.',
    measures=(Measure('decoder', early),),
)
