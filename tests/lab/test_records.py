import json

import pytest
import torch

from gpt2_to_k3.lab import load_data, load_record, pick_device, records


@pytest.mark.parametrize("name", ["h200_roofline", "h200_gpt2_decode"])
def test_a_record_says_who_measured_it_and_how(name):
    record = load_record(name)
    script = record["command"].split()[1]
    assert set(records.PROVENANCE) <= set(record) and script.startswith("benchmarks/")


def test_data_without_provenance_is_not_a_record():
    with pytest.raises(ValueError, match="kimi_k3.*device"):
        load_record("kimi_k3")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="kimi_k3"):
        load_data("nothing")


def test_measured_series_have_equal_lengths():
    result = load_record("h200_gpt2_decode")["result"]
    assert len(result["cached_seconds"]) == len(result["contexts"])
    assert json.dumps(result)


def test_picks_the_best_device_there_is(monkeypatch):
    assert pick_device("cpu").type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert pick_device().type == "cpu"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device().type == "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device().type == "cuda"


def test_a_device_that_is_not_there_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device.*cuda"):
        pick_device("cuda")
    with pytest.raises(ValueError, match="^device: expected one of .*, got 'gpu'"):
        pick_device("gpu")
