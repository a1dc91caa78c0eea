"""Requests to edit a text or to sum it up, whose answers copy much of it: prompts for n-gram lookup."""

from __future__ import annotations

CODE = """class Basket:
    def __init__(self, owner):
        self.owner = owner
        self.items = []

    def add(self, name, price):
        self.items.append((name, price))

    def total(self):
        return sum(price for name, price in self.items)
"""
TEXT = (
    "The harbour was quiet when the first ferry came in. Two men tied the ropes, and a woman with a red "
    "suitcase walked to the station. She had receive a letter the day before and wanted to answer it."
)
LIST = "apples, pears, plums, cherries, apricots, quinces, figs, grapes, lemons, walnuts"
TASKS = (
    f"Rewrite this class, renaming it to Cart:\n{CODE}",
    f"Rewrite this class, renaming items to goods:\n{CODE}",
    f"Add a docstring to each method of this class:\n{CODE}",
    f"Correct the grammar of this text:\n{TEXT}",
    f"Rewrite this text in the present tense:\n{TEXT}",
    f"Summarise this text with its own words:\n{TEXT}",
    f"Repeat this list, one item per line with a number before it:\n{LIST}",
    f"Sort this list by the alphabet:\n{LIST}",
)
