"""Archives for the tests: honest ones of other tools (`makers`), hostile ones (`hostile`), damaged ones (`mutate`).

All are written by `raw`, a writer that can be told to lie, or by the tool that a maker is named after.
"""
