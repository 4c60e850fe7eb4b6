"""Operations on checkpoints that are no part of training: list, copy, compare, check, export, import, try a store.

They are what the command line calls, and can be called from Python as well::

    listing, locating    what lies below a url: iterations, components, whose they are
    copying              from store to store
    exporting            to safetensors (``safetensors_files``) and to torch files (``torch_files``)
    importing            the other way round
    comparing, checking  two checkpoints with each other, one with its checksums
    benchmarking         how fast a store is, and what to change
"""
