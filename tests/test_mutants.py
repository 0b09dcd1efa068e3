"""Do the tests notice? Each wrong version of a function is swapped in, and the test that is named
for it must fail, by an assert of the test itself and not by a crash.
"""

import importlib
import traceback
from pathlib import Path

import pytest

import flow_grpo
from tests import mutants, test_flow_grpo
from tests.mutants_engine import ENGINE_MUTANTS
from tests.mutants_flow import FLOW_MUTANTS
from tests.mutants_scores import SCORE_MUTANTS
from tests.mutants_train import TRAIN_MUTANTS

OURS = (Path(flow_grpo.__file__).parent, Path(__file__).parent)  # the folders of our own files


def named_test(path: str):
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def owner_and_name(mutant: mutants.Mutant):
    """("memory", "Memory.render") -> (the class Memory, "render")."""
    owner = importlib.import_module(mutant.module)
    *path, name = mutant.attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, name


ALL = [*mutants.MUTANTS, *ENGINE_MUTANTS, *FLOW_MUTANTS, *SCORE_MUTANTS, *TRAIN_MUTANTS]


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_the_named_test_notices_the_wrong_version(mutant, monkeypatch):
    owner, name = owner_and_name(mutant)
    test = named_test(mutant.test)
    monkeypatch.setattr(owner, name, mutant.wrong)  # an unknown name raises here
    with pytest.raises(AssertionError) as caught:
        test()
    # An assert inside one of our functions refuses bad input: the mutant crashed, no test spoke.
    frames = traceback.extract_tb(caught.value.__traceback__)
    files = [Path(frame.filename) for frame in frames if Path(frame.filename).parent in OURS]
    assert files[-1] == Path(importlib.import_module(test.__module__).__file__), (
        f"failed inside {files[-1]}, not by an assert of {mutant.test}"
    )


@pytest.mark.parametrize("attribute", mutants.RIGHT)
def test_the_versions_that_mutants_start_from_are_right(attribute, monkeypatch):
    """Otherwise a mutant might be noticed for a fault of its frame and not for the one it shows."""
    tests = {mutant.test for mutant in mutants.MUTANTS if mutant.attribute == attribute}
    monkeypatch.setattr(flow_grpo, attribute, mutants.RIGHT[attribute])
    for test in map(named_test, sorted(tests)):
        if test is not test_flow_grpo.test_memory_does_not_grow_with_the_vocabulary:
            test()


def test_there_are_enough_mutants_and_each_has_its_own_name():
    names = [mutant.name for mutant in mutants.MUTANTS]
    assert len(names) >= 25 and len(set(names)) == len(names)
