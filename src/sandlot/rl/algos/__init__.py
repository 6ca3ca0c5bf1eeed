"""The table of algorithms: a name in a recipe to the import string of its class.

To add one, write its module beside these, add a line here and a test. A recipe may also name one by import string
(`algorithm = "my_package.my_module:MyAlgorithm"`), so that an experiment needs no change here.
"""

ALGORITHMS: dict[str, str] = {
    "grpo": "sandlot.rl.algos.grpo:Grpo",
    "sft": "sandlot.rl.algos.sft:Sft",
}
