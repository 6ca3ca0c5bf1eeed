"""Images from a recipe or a Dockerfile, made in sandboxes: `sandlot image build`.

    recipe.py       a TOML file   ─┐
    dockerfile.py   a Dockerfile  ─┴▶ steps.py ──▶ builder.py ──▶ NodeAPI: a box and a snapshot for each step
    context.py      the files that a step copies ──▶ ┘

It is a customer of the API like any other and knows no driver, so that it builds on a server as it does here.
"""
