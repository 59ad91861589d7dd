"""The GPU check: ordinary tests in ``tests/gpu``, run in child processes with limits. ``make gpu-check`` calls it.

``command`` parses and prints, ``collect`` lists the checks, ``runner`` runs them in children (``child``), ``report``
keeps the results. The other modules are what the tests judge with: ``teacher_forced``, ``near_tie``, ``stress``,
``kernels`` and ``inner_pytest``, with ``serving`` and ``models``. ``tests/gpu_check`` tests all of them on the CPU.
"""
