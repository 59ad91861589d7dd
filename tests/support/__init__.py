"""What tests of several packages share. pytest finds it by its setting ``pythonpath``, a child by :func:`child_env`."""
