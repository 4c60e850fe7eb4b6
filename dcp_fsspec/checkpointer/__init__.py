"""A training job's checkpoints in one folder of any store.

::

    save    state -> snapshot -> uploading: here, in a thread or in a process -> saving -> catalog
    load    resume, locating -> matching -> loading -> state

`checkpointer` puts these in order; `catalog` makes every change on storage; `group` lets all ranks come to one answer.
"""
