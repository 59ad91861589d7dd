"""Every check of the installed GPU backends on this machine, as one command: ``make gpu-check``.

``command`` parses and prints, ``catalogue`` lists the checks, ``process`` runs them in child processes (``worker`` is
the child), ``report`` keeps what they found. What is checked is in ``machine``, ``conformance``, ``geometry``,
``parity``, ``forced``, ``crowd``, ``hygiene``, ``cases``, ``folders`` and ``sanitizer``.
``kernels`` knows which kernels are ours, ``launched`` which of them tests have launched.
"""
