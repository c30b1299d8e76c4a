# SPDX-License-Identifier: Apache-2.0
"""Recordings of other programs, converted by scripts/record_routing.py."""
import numpy as np
import pytest

from clone import ROOT, script

torch = pytest.importorskip("torch")

E, K, LAYERS = 4, 2, 3


@pytest.fixture(scope="module")
def recording():
    return script("record_routing")


def written(path, rank, passes, logical, **more):
    """Writes what SGLang 0.5.23 writes in the mode per_token, with the passes in another order."""
    records = [{"forward_pass_id": number, "rank": rank, "gatherer_key": "primary", "topk_ids_of_layer": torch.tensor(ids, dtype=torch.int32),
                "misc_objects": [], "global_physical_count": torch.zeros(LAYERS, logical.shape[1], dtype=torch.int32)}
               for number, ids in enumerate(passes)]
    torch.save({"records": records[::-1], "last_physical_to_logical_map": torch.tensor(logical), **more}, path)


def test_files_of_sglang(recording, tmp_path, capsys):
    rng = np.random.default_rng(3)
    logical = np.stack([rng.permutation([0, 1, 2, 3, 1, 0]) for _ in range(LAYERS)])  # six slots
    passes = {rank: [rng.integers(-1, 6, (LAYERS, tokens, K)) for tokens in (3, 1)] for rank in (0, 1)}
    for rank, slots in passes.items():
        written(tmp_path / f"{rank}.pt", rank, slots, logical)
    out = tmp_path / "routing.safetensors"
    assert recording.main(["from_sglang", str(out), str(tmp_path / "0.pt"), str(tmp_path / "1.pt")]) == 0, capsys.readouterr().err
    tensors, metadata = recording.load_safetensors(out)
    assert metadata["num_experts"] == str(E) and len(tensors) == 2 * LAYERS
    for rank, slots in passes.items():
        for layer in range(LAYERS):
            ids = np.concatenate([each[layer] for each in slots])
            assert np.array_equal(tensors[f"layer{layer}.rank{rank}.topk_ids"], [[logical[layer][i] if i >= 0 else -1 for i in row] for row in ids])


def test_files_that_are_not_recordings(recording, tmp_path, capsys):
    def fails(path, text):
        assert recording.main(["from_sglang", str(tmp_path / "out.safetensors"), str(path)]) == 1
        assert text in capsys.readouterr().err
        assert not (tmp_path / "out.safetensors").exists()

    torch.save({"rank": 0, "logical_count": torch.ones(2, 3, 4)}, tmp_path / "stat.pt")
    fails(tmp_path / "stat.pt", "expert_location.load_counts reads them")
    torch.save([1], tmp_path / "list.pt")
    fails(tmp_path / "list.pt", "expected the entries records")
    torch.save({"records": [{"forward_pass_id": 0, "rank": 0}], "last_physical_to_logical_map": torch.zeros(1, 1, dtype=torch.int64)}, tmp_path / "none.pt")
    fails(tmp_path / "none.pt", "expected topk_ids_of_layer")
    (tmp_path / "text.pt").write_text("no torch")
    fails(tmp_path / "text.pt", "text.pt: expected a file of torch.save")
    fails(tmp_path / "missing.pt", "missing.pt")
    torch.save({"records": ROOT}, tmp_path / "objects.pt")
    fails(tmp_path / "objects.pt", "tensors and plain values")
