"""Public names are of the public modules, for people and for programs."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import pydoc
import typing
from typing import Any

import numpy as np
import pytest

from gemmakv import Gemma, Generation
from support.public_names import MODULES

NAMES = [
    (module, name)
    for module in MODULES
    if module != "gemmakv.chat.store"
    for name in importlib.import_module(module).__all__
]


def thing_of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_name_is_of_the_module_that_has_it(module: str, name: str) -> None:
    thing = thing_of(module, name)
    if not inspect.isclass(thing) and not inspect.isfunction(thing):
        return
    home = thing.__module__
    assert "._" not in home and len(home) <= len(module)
    assert thing_of(home, thing.__name__) is thing
    assert pickle.loads(pickle.dumps(thing)) is thing
    assert copy.copy(thing) is thing
    assert name in pydoc.render_doc(thing, renderer=pydoc.plaintext)
    if inspect.isclass(thing):
        own = vars(thing).get("__annotations__", {})
        assert set(own) <= set(typing.get_type_hints(thing))


def test_results_can_be_pickled_and_copied(tiny: Gemma) -> None:
    found = tiny.generate("ab", max_tokens=2, logprobs=True)
    for again in (pickle.loads(pickle.dumps(found)), copy.deepcopy(found)):
        assert isinstance(again, Generation)
        assert again.token_ids == found.token_ids
        assert np.array_equal(again.logprobs, found.logprobs)
    by_old_path = importlib.import_module("gemmakv.generation._result")
    assert by_old_path.Generation is Generation
