"""The hidden-state store: what extraction writes and training reads.

A store is a folder:

    manifest.json            what it holds and what a reader must match
    shard-00000.safetensors  packed rows of whole samples, in data order
    shard-00000.arrow        index of that shard's samples; its rename commits the shard
    shard-00001 ...
    rejected.json            samples that were left out, and why

Arrays of a shard, N rows and M <= N rows with a final state:

    input_ids [N] int32, loss_mask [N] uint8
    aux.*     [N, ...]  the codec's tensors for the concatenated aux states [N, num_aux * H]
    final.*   [M, ...]  the codec's tensors for the post-norm final states [M, H]

Only rows that some teacher needs keep their final state (`batch.needed_final`). Samples lie in the
order of the input data whatever order they were captured in, so that the same run gives the same
bytes.
"""
