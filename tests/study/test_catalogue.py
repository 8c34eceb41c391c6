"""The stored catalogue repeats the declarations of the classes, and caches what they cache."""

import json

from qkattn.attention import SCORES, VALUES
from qkattn.study import catalogue, variant_tables

STORED = variant_tables.stored()


def test_the_catalogue_is_stored_and_every_variant_documented():
    assert json.loads(json.dumps(catalogue.measured())) == STORED
    documented = catalogue.documented_variants()
    assert len(documented) == len(set(documented))
    scores, values = map(set, zip(*documented, strict=True))
    assert scores >= {*SCORES} and values >= {*VALUES}
