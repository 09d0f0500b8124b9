# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.accelerator.hunt SAYS`: hunt one mutant where the fake accelerator is."""

import json
import sys

import attrs

from tests.accelerator import fake
from tests.mutants import profile

if __name__ == "__main__":
    fake.install()
    profile.load()

    from tests.mutants.hunt import hunt
    from tests.mutants.table import read_table

    (mutant,) = [each for each in read_table() if each.says == sys.argv[1]]
    found = hunt(mutant)
    told = attrs.asdict(found, filter=lambda field, _: field.name != "mutant")
    sys.__stdout__.write(f"\n{json.dumps(told)}\n")
