from time import sleep

import pytest

from gpt2_to_k3.lab import side_by_side


def test_steps_take_turns_and_the_first_round_does_not_count():
    calls = []

    def slow_at_first():
        calls.append("a")
        if len(calls) == 1:
            sleep(0.2)

    times = side_by_side({"a": slow_at_first, "b": lambda: calls.append("b")}, rounds=3)
    assert calls == ["a", "b"] * 4 and set(times) == {"a", "b"}
    assert times["a"] < 0.1


def test_the_time_is_per_call():
    times = side_by_side({"short": lambda: sleep(0.01), "long": lambda: sleep(0.05)}, inner=3)
    assert 0.009 < times["short"] < times["long"] and times["long"] >= 0.049


@pytest.mark.parametrize("bad", [{"rounds": 0}, {"inner": 0}])
def test_counts_below_one_are_refused(bad):
    with pytest.raises(ValueError, match="rounds, inner"):
        side_by_side({}, **bad)
