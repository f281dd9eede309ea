"""Tasks of lm-evaluation-harness: `adapter` answers its requests, `run` measures and writes.

Only `adapter` imports the harness at its top; `run` imports it once the package is known to be
there.
"""
