"""The CPU stand-in kernels against hand-worked trees and naive loops."""

import importlib.util
from types import ModuleType

import pytest
import torch

from eagle3.serving import cpu


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    """The stand-in, loaded under another name so that an installed sgl_kernel stays itself."""
    path = cpu.KERNELS_DIR / "sgl_kernel" / "__init__.py"
    spec = importlib.util.spec_from_file_location("cpu_standin_kernels", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_tree(kernels, parents, selected, seq_lens, topk, depth):
    batch, num = len(selected), len(selected[0]) + 1
    mask = torch.ones(batch * num * num, dtype=torch.bool)  # stale content must not survive
    positions = torch.full((batch * num,), -7)
    index, child, sibling = (torch.full((batch, num), -1) for _ in range(3))
    kernels.build_tree_kernel_efficient_cpu(
        torch.tensor(parents),
        torch.tensor(selected),
        torch.tensor(seq_lens),
        mask,
        positions,
        index,
        child,
        sibling,
        topk,
        depth,
        num,
        1,
    )
    return (
        mask.view(batch, num, num).int().tolist(),
        positions.view(batch, num),
        index,
        child,
        sibling,
    )


def test_tree_of_a_chain(kernels):
    # topk 1, three steps: candidate i expands candidate i - 1
    mask, positions, index, child, sibling = build_tree(
        kernels, [[-1, 0, 1], [-1, 0, 1]], [[0, 1, 2], [0, 1, 2]], [10, 20], topk=1, depth=3
    )
    assert mask == [[[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]] * 2
    assert positions.tolist() == [[10, 11, 12, 13], [20, 21, 22, 23]]
    assert index.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert child.tolist() == [[1, 2, 3, -1]] * 2
    assert sibling.tolist() == [[-1] * 4] * 2


def test_tree_with_branches(kernels):
    # topk 2. Candidates 0, 1 are children of the root; 2, 3 of candidate 0 (expansion 1);
    # 4, 5 of candidate 1 (expansion 2). Selected 0, 1, 2, 3, 4 become nodes 1..5.
    mask, positions, _, child, sibling = build_tree(
        kernels, [[-1, 0, 1]], [[0, 1, 2, 3, 4]], [7], topk=2, depth=2
    )
    assert mask == [
        [
            [1, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0],
            [1, 0, 1, 0, 0, 0],
            [1, 1, 0, 1, 0, 0],
            [1, 1, 0, 0, 1, 0],
            [1, 0, 1, 0, 0, 1],
        ]
    ]
    assert positions.tolist() == [[7, 8, 8, 9, 9, 9]]
    assert child.tolist() == [[1, 3, 5, -1, -1, -1]]
    assert sibling.tolist() == [[-1, 2, -1, 4, -1, -1]]


def test_node_without_its_parent_is_unreachable(kernels):
    # candidate 2's parent, candidate 0, was not selected
    _, _, _, child, sibling = build_tree(kernels, [[-1, 0, 1]], [[1, 2]], [5], topk=2, depth=2)
    assert child.tolist() == [[1, -1, -1]]
    assert sibling.tolist() == [[-1, -1, -1]]


def test_only_the_cpu_mask_mode_is_served(kernels):
    arguments = [torch.zeros(1, 1)] * 8 + [1, 1, 2, 0]
    with pytest.raises(NotImplementedError, match="tree_mask_mode"):
        kernels.build_tree_kernel_efficient_cpu(*arguments)


def verify(kernels, candidates, child, sibling, target, steps):
    batch, num = len(candidates), len(candidates[0])
    predicts = torch.zeros(batch * num, dtype=torch.int32)
    accept_index = torch.full((batch, steps + 1), -1, dtype=torch.int32)
    accepted = torch.zeros(batch, dtype=torch.int32)
    kernels.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=accepted,
        candidates=torch.tensor(candidates),
        retrive_index=torch.arange(batch * num).view(batch, num),
        retrive_next_token=torch.tensor(child),
        retrive_next_sibling=torch.tensor(sibling),
        target_predict=torch.tensor(target),
    )
    return predicts.tolist(), accept_index.tolist(), accepted.tolist()


def test_verify_takes_the_second_sibling_and_its_child(kernels):
    # nodes: root 0 -> {1: token 50, 2: token 60}; 1 -> {3: 70}; 2 -> {4: 80}
    # target after the root says 60, after node 2 says 80, after node 4 says 90
    child, sibling = [[1, 3, 4, -1, -1]], [[-1, 2, -1, -1, -1]]
    predicts, index, accepted = verify(
        kernels, [[40, 50, 60, 70, 80]], child, sibling, [[60, 1, 80, 2, 90]], steps=2
    )
    assert accepted == [2]
    assert index == [[0, 2, 4]]
    assert [predicts[i] for i in (0, 2, 4)] == [60, 80, 90]


def test_verify_stops_at_the_first_mismatch_of_each_request(kernels):
    chain, alone = [1, 2, -1], [-1, -1, -1]
    predicts, index, accepted = verify(
        kernels,
        [[5, 6, 7], [5, 6, 7], [5, 6, 7]],
        [chain] * 3,
        [alone] * 3,
        [[9, 0, 0], [6, 9, 0], [6, 7, 9]],
        steps=2,
    )
    assert accepted == [0, 1, 2]
    assert index == [[0, -1, -1], [3, 4, -1], [6, 7, 8]]
    assert predicts == [9, 0, 0, 6, 9, 0, 6, 7, 9]


@pytest.mark.parametrize("with_select", [False, True])
def test_rotate_input_ids(kernels, with_select):
    generator = torch.Generator().manual_seed(0)
    lens = [3, 0, 1, 5]
    starts = torch.tensor([0, 3, 3, 4], dtype=torch.int32)
    ids = torch.randint(100, (9,), generator=generator)
    tokens = torch.tensor([[100], [101], [102], [103]])
    select = torch.tensor([1, 0, 3, 6]) if with_select else None
    expected = ids.tolist()
    for b, (start, length) in enumerate(zip(starts.tolist(), lens, strict=True)):
        if length:
            for i in range(start, start + length - 1):
                expected[i] = int(ids[i + 1])
            last = int(select[b]) if with_select else start + length - 1
            expected[last] = 100 + b
    kernels.rotate_input_ids_cpu(ids, starts, torch.tensor(lens, dtype=torch.int32), tokens, select)
    assert ids.tolist() == expected


def test_draft_metadata_gives_each_branch_its_own_slots(kernels):
    table = torch.arange(40, dtype=torch.int32).view(2, 20) + 100
    out = kernels.build_draft_decode_metadata_cpu(
        table, torch.tensor([1, 0]), torch.tensor([3, 5]), topk=2, num_steps=2, pool_len=20
    )
    assert out.shape == (4, 20)
    assert out[0, :6].tolist() == [120, 121, 122, 123, 124, 0]
    assert out[1, :6].tolist() == [120, 121, 122, 125, 126, 0]
    assert out[2, :8].tolist() == [100, 101, 102, 103, 104, 105, 106, 0]
    assert out[3, :8].tolist() == [100, 101, 102, 103, 104, 107, 108, 0]


def test_slots_go_into_the_table_and_come_back(kernels):
    table = torch.zeros(3, 8, dtype=torch.int32)
    rows, starts, ends = torch.tensor([2, 0]), torch.tensor([1, 4]), torch.tensor([4, 6])
    slots = torch.tensor([11, 12, 13, 21, 22])
    kernels.assign_req_to_token_pool_cpu(rows, table, starts, ends, slots, 8)
    assert table.tolist() == [
        [0, 0, 0, 0, 21, 22, 0, 0],
        [0] * 8,
        [0, 11, 12, 13, 0, 0, 0, 0],
    ]
    back = torch.zeros(7, dtype=torch.int64)
    kernels.assign_extend_cache_locs_cpu(rows, table, starts, ends, back, 8)
    assert back.tolist() == [11, 12, 13, 21, 22, 0, 0]
    draft = torch.zeros(4, dtype=torch.int64)
    kernels.assign_draft_cache_locs_contiguous_cpu(rows, table, starts, draft, 8, 1, 2)
    assert draft.tolist() == [11, 12, 21, 22]


def test_bonus_tokens_and_accepted_slots(kernels):
    bonus = torch.zeros(2, dtype=torch.int64)
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    kernels.fill_bonus_tokens_cpu(tokens, torch.tensor([3, 1]), bonus, 3)
    assert bonus.tolist() == [3, 4]
    kept = torch.zeros(4, dtype=torch.int64)
    accepted = torch.tensor([[0, 2, -1], [3, -1, -1]])
    kernels.fill_accept_out_cache_loc_cpu(accepted, torch.tensor([10, 11, 12, 13, 14, 15]), kept)
    assert kept.tolist() == [10, 12, 13, 0]


def test_cache_rows_move_in_every_layer_even_when_they_overlap(kernels):
    layers = [torch.randn(6, 2, 3), torch.randn(6, 4)]
    before = [layer.clone() for layer in layers]
    target, source = torch.tensor([1, 2]), torch.tensor([2, 5])
    kernels.copy_all_layer_kv_cache_cpu(
        torch.tensor([layer.data_ptr() for layer in layers]),
        torch.tensor([layer.stride(0) * layer.element_size() for layer in layers]),
        target,
        source,
    )
    for layer, old in zip(layers, before, strict=True):
        old[target] = old[source]
        assert torch.equal(layer, old)


def test_a_missing_kernel_names_itself(kernels):
    with pytest.raises(NotImplementedError, match="weight_packed_linear"):
        kernels.weight_packed_linear(1)


def test_environment_puts_the_stand_in_first(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv(cpu.THREADS_VARIABLE, "3")
    environment = cpu.environment()
    assert environment["PYTHONPATH"].split(":") == [str(cpu.KERNELS_DIR), "/somewhere"]
    assert environment["OMP_NUM_THREADS"] == "3"
