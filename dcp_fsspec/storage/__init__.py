"""DCP's storage protocol for any url that fsspec can reach.

Data flows one way::

    save   writer -> splitting (plan) -> framing (bytes) -> transfer (threads, budget) -> filesystem (publish)
    load   reader -> ranges (plan) -> transfer -> filesystem (read) -> framing (tensors)

``metadata`` and ``checksums`` are the two small files beside the shard files; ``safe_pickle`` opens the first
of them without running anything. Knows nothing of iterations or of training.
"""
