"""Errors of arguments: what they say, and what programs ask them for."""

from __future__ import annotations

import copy
import math
import pickle
import threading

import pytest

from gemmakv import _core
from gemmakv.errors import ArgumentError, CorruptFile, unexpected, within


def test_an_argument_error_says_its_parts() -> None:
    error = ArgumentError("messages[0].role", "one of a, b", "c")
    assert isinstance(error, ValueError)
    assert str(error) == "messages[0].role: expected one of a, b, found 'c'"
    assert error.args == (str(error),)
    assert error.argument == "messages[0].role"
    assert error.expected == "one of a, b"
    assert error.found == "c"


def test_the_message_may_show_the_value_in_other_words() -> None:
    error = ArgumentError("text", "Unicode", "\ud800", shown="a surrogate")
    assert str(error) == "text: expected Unicode, found a surrogate"
    assert error.found == "\ud800"


def test_unexpected_makes_it_or_another_kind() -> None:
    error = unexpected("seed", "an integer", 1.5)
    assert type(error) is ArgumentError and error.found == 1.5
    error = unexpected("a.json", "a list", {}, CorruptFile)
    assert type(error) is CorruptFile
    assert str(error) == "a.json: expected a list, found {}"


@pytest.mark.parametrize("found", [None, True, 7, 0.5, "a", b"a"])
def test_plain_values_survive_pickling(found: object) -> None:
    error = ArgumentError("x", "more", found)
    error.add_note("while testing")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is ArgumentError
        assert twin.found == found and type(twin.found) is type(found)
        assert (twin.argument, twin.expected) == ("x", "more")
        assert str(twin) == str(error)
        assert twin.__notes__ == ["while testing"]


def test_a_value_that_cannot_be_pickled_becomes_text() -> None:
    error = ArgumentError("x", "a number", threading.Lock())
    twin = pickle.loads(pickle.dumps(error))
    assert str(twin) == str(error)
    assert isinstance(twin.found, str)
    assert twin.found.startswith("<unlocked _thread.lock")


def test_what_the_core_refuses_has_the_same_parts() -> None:
    options = _core.GenerateOptions()
    options.stop_token_ids = [9]
    with pytest.raises(ArgumentError) as caught:
        options.validate(8)
    error = caught.value
    assert str(error) == "stop_token_ids: expected token ids in 0..7, found 9"
    assert (error.argument, error.found) == ("stop_token_ids", 9)
    assert error.expected == "token ids in 0..7"
    options = _core.GenerateOptions()
    options.logit_bias = [(1, math.nan)]
    with pytest.raises(ArgumentError) as caught:
        options.validate(8)
    assert caught.value.found == "nan for token 1"


def test_other_words_of_the_core_are_no_argument_s() -> None:
    with pytest.raises(ValueError, match="unknown model type 'x'") as caught:
        _core.ModelConfig.from_name("x")
    assert type(caught.value) is ValueError


def test_within_names_the_whole() -> None:
    inner = ArgumentError("role", "one of a, b", "c")
    error = within("messages[2].", inner)
    assert isinstance(error, ArgumentError)
    assert str(error) == f"messages[2].{inner}"
    assert error.argument == "messages[2].role"
    assert (error.expected, error.found) == ("one of a, b", "c")
    other = within("messages[2].", ValueError("role: no"))
    assert type(other) is ValueError and str(other) == "messages[2].role: no"
