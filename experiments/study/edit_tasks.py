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
TASKS = (
    f"Rewrite this class, renaming it to Cart:\n{CODE}",
    f"Rewrite this class, renaming items to goods:\n{CODE}",
    f"Correct the grammar of this text:\n{TEXT}",
    f"Summarise this text in its own words:\n{TEXT}",
)
