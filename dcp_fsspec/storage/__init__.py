"""DCP's storage protocol for any url that fsspec can reach.

Data flows one way::

    save   writer -> saving -> splitting (plan) -> upload -> framing (bytes) -> transfer (threads) -> filesystem
    load   reader -> opened (.metadata) -> reading -> fetching, ranges (plan) -> transfer -> filesystem
           -> framing (tensors)

``writer`` and ``reader`` are DCP's protocol, ``saving`` and ``reading`` the work behind it. ``metadata`` and
``checksums`` are the two small files beside the shard files; ``safe_pickle`` and ``pickle_scan`` open the first of them
without running anything, ``byte_items`` does the same for Python values. ``inspecting`` looks around in a checkpoint
and reads single tensors, ``verifying`` checks all of it. ``filesystem`` is the one way to storage: ``opening`` and
``location`` read urls, ``capabilities`` says what a store can be trusted with, ``clients``, ``signing`` and ``direct``
are the short ways to it, ``local``, ``moving``, ``streaming`` and ``conditional`` do what fsspec cannot, ``retry`` and
``translation`` deal with its errors. Knows nothing of iterations or of training.
"""
