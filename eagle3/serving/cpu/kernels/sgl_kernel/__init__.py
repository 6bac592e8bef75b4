"""Stand-in for SGLang's compiled kernel package `sgl_kernel`, in plain torch.

The real package needs libcuda to import. On its CPU engine SGLang uses only the few kernels below,
most of them for speculative decoding; each does what the kernel of the same name does, written from
the call sites in `sglang/kernels/ops`. The parent folder goes on PYTHONPATH of a server process
before site-packages (see `eagle3.serving.cpu.environment`) and nowhere else.

Arguments marked "out" are written in place. B is the number of requests in the batch.
"""

import ctypes
from collections.abc import Callable
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

__version__ = "0.0.0+cpu.standin"

_QLEN_ONLY = 1  # SGLang's TreeMaskMode.QLEN_ONLY, the only mode of its CPU path


def _token_ranges(starts: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Flatten B half-open ranges: (owner of each element, its position).

    starts [0, 5], ends [2, 6] -> owners [0, 0, 1], positions [0, 1, 5].
    """
    starts, lens = starts.long(), (ends - starts).long()
    owners = torch.repeat_interleave(torch.arange(lens.numel()), lens)
    first = lens.cumsum(0) - lens
    return owners, torch.arange(owners.numel()) + (starts - first)[owners]


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """`assign_req_to_token_pool_cpu`: note in the slot table (out) where new tokens are cached.

    Request b owns positions start_offset[b]..end_offset[b]; out_cache_loc has all slots in order.
    """
    owners, positions = _token_ranges(start_offset, end_offset)
    slots = out_cache_loc[: owners.numel()].to(req_to_token.dtype)
    req_to_token[req_pool_indices.long()[owners], positions] = slots


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """`assign_extend_cache_locs_cpu`: the reverse, table positions to flat slots (out)."""
    owners, positions = _token_ranges(start_offset, end_offset)
    out_cache_loc[: owners.numel()] = req_to_token[req_pool_indices.long()[owners], positions]


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """`assign_draft_cache_locs_contiguous_cpu`: the topk * num_steps slots (out) past each end."""
    owners, positions = _token_ranges(seq_lens, seq_lens + topk * num_steps)
    out_cache_loc.copy_(req_to_token[req_pool_indices.long()[owners], positions])


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> Tensor:
    """`build_draft_decode_metadata_cpu`: one slot table row for each draft branch.

    Row b * topk + k of [B * topk, pool_len] holds the slots of request b's sequence, then those of
    its branch k, which the request's own row keeps at seq_len + k * num_steps; then zeros.
    """
    table = req_to_token.new_zeros((req_pool_indices.numel() * topk, pool_len))
    requests = req_to_token[req_pool_indices.long()]
    for own, branches, length in zip(requests, table.split(topk), seq_lens.tolist(), strict=True):
        end = length + topk * num_steps
        branches[:, :length] = own[:length]
        branches[:, length : length + num_steps] = own[length:end].view(topk, num_steps)
    return table


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int
) -> None:
    """`fill_bonus_tokens_cpu`: the last accepted token of each request (out [B])."""
    last = torch.arange(accept_lens.numel()) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor
) -> None:
    """`fill_accept_out_cache_loc_cpu`: cache slots of the accepted tokens (out), closed up."""
    accepted = accept_index[accept_index > -1].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted]


def rotate_input_ids_cpu(
    input_ids: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None = None,
) -> None:
    """`rotate_input_ids_cpu`: shift each request's ids (out) left by one, its new token goes last.

    [a, b, c] with new token x -> [b, c, x]. With select_index the new token goes to that flat
    position instead of the end. Requests of length 0 are left alone.
    """
    owners, positions = _token_ranges(extend_start_loc, extend_start_loc + extend_seq_lens)
    is_last = positions + 1 == (extend_start_loc + extend_seq_lens).long()[owners]
    shifted = positions[~is_last]
    input_ids[shifted] = input_ids[shifted + 1]
    used = extend_seq_lens > 0
    target = positions[is_last] if select_index is None else select_index[used].long()
    input_ids[target] = topk_index.flatten()[: used.numel()][used].to(input_ids.dtype)


def _parent_nodes(parents: list[int], selected: list[int], topk: int) -> list[int | None]:
    """Tree node of each selected candidate's parent: 0 is the root, node i+1 is selected[i].

    A candidate's id // topk says which expansion made it: 0 is the root's, and `parents` gives the
    candidate that was expanded otherwise. None: the parent itself was not selected.
    """
    node_of = {candidate: node for node, candidate in reversed(list(enumerate(selected, 1)))}
    expansions = [candidate // topk for candidate in selected]
    return [0 if e == 0 else node_of.get(parents[e]) for e in expansions]


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """`build_tree_kernel_efficient_cpu`: links, positions and mask of each request's draft tree.

    Out: tree_mask [B * n * n] (node t sees its ancestors and itself), positions [B * n],
    retrive_index [B, n] (flat number of a node), retrive_next_token (first child, or -1) and
    retrive_next_sibling (next child of the same parent, or -1), both [B, n] and all -1 on entry.
    A node whose parent is missing is left without links, so it can never be accepted.
    """
    if int(tree_mask_mode) != _QLEN_ONLY:
        raise NotImplementedError(f"tree_mask_mode {tree_mask_mode}: CPU has only QLEN_ONLY (1)")
    num, mask = draft_token_num, tree_mask.view(-1, draft_token_num, draft_token_num)
    retrive_index.copy_(torch.arange(retrive_index.numel()).view_as(retrive_index))
    mask.copy_(torch.eye(num, dtype=mask.dtype).expand_as(mask))
    mask[:, :, 0] = True
    parents, selected = parent_list.tolist(), selected_index.tolist()
    for b, seq_len in enumerate(verified_seq_len.tolist()):
        parent_of = [0, *_parent_nodes(parents[b], selected[b], topk)]
        first_child, next_sibling, depths = [-1] * num, [-1] * num, [0] * num
        for node in range(num - 1, 0, -1):
            if (parent := parent_of[node]) is not None:
                next_sibling[node], first_child[parent] = first_child[parent], node
        for node in range(1, num):
            ancestor: int | None = node
            while ancestor and depths[node] < depth:
                mask[b, node, ancestor] = True
                depths[node] += 1
                ancestor = parent_of[ancestor]
        retrive_next_token[b] = retrive_next_token.new_tensor(first_child)
        retrive_next_sibling[b] = retrive_next_sibling.new_tensor(next_sibling)
        positions[b * num : (b + 1) * num] = positions.new_tensor(depths) + seq_len


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """`verify_tree_greedy_cpu`: walk each tree along the target's own choices.

    Out: accept_index [B, steps + 1] (flat numbers of root and accepted nodes), accept_token_num [B]
    (accepted nodes without the root), predicts [B * n] (the target's token at every visited node).
    """
    target, flat = target_predict.flatten().tolist(), retrive_index.tolist()
    child, sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    for b, tokens in enumerate(candidates.tolist()):
        path, node = [flat[b][0]], 0
        while len(path) < accept_index.shape[1]:
            node = child[b][node]
            while node != -1 and tokens[node] != target[path[-1]]:
                node = sibling[b][node]
            if node == -1:
                break
            path.append(flat[b][node])
        accept_index[b, : len(path)] = accept_index.new_tensor(path)
        accept_token_num[b] = len(path) - 1
        predicts[path] = predicts.new_tensor([target[i] for i in path])


def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor
) -> None:
    """`copy_all_layer_kv_cache_cpu`: move cache rows src_loc to tgt_loc in every layer's buffers.

    data_ptrs are the buffers' addresses and strides the bytes of one row in each.
    """
    target, source = tgt_loc.long().numpy(), src_loc.long().numpy()
    if target.size == 0:
        return
    num_rows = int(max(target.max(), source.max())) + 1
    for address, row_bytes in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (num_rows * row_bytes)).from_address(address)
        rows = np.frombuffer(memory, dtype=np.uint8).reshape(num_rows, row_bytes)
        rows[target] = rows[source]  # the right side is copied first, so overlap is safe


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """Let SGLang import any other kernel by name; calling it is an error."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU stand-in")

    return missing
