"""What answers the model gateway's questions. A name in a recipe to the import string of its class."""

ENGINES: dict[str, str] = {"local": "sandlot.rl.engines.local:LocalEngine"}
