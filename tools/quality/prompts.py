"""The prompts whose greedy continuations are golden: 20, as unlike as can be.

Written for this repository. Long ones run past the sliding window (512) and
past four times its length.
"""

from __future__ import annotations

import gguf_reference

_LEDGER = "day,ship,cargo,tons,port\n" + "".join(
    f"{1 + 7 * i % 28:02d},{ship},{cargo},{40 + 13 * i % 90},{port}\n"
    for i, (ship, cargo, port) in enumerate(
        (s, c, p)
        for s in ("Alcyone", "Meridian", "Brant", "Sorrel")
        for c, p in (("wheat", "Odense"), ("timber", "Riga"),
                     ("salt", "Setubal"), ("wool", "Leith"),
                     ("iron", "Luleå"), ("copper", "Falun"),
                     ("tar", "Oulu"), ("hemp", "Pillau"),
                     ("coal", "Blyth"), ("rye", "Danzig"),
                     ("fish", "Bergen"), ("slate", "Caernarfon")))
)

_SHORT = {
    "capital": "The capital of France is",
    "recipe": "Ingredients for four people:\n- 500 g of flour\n- 2 eggs\n-",
    "python": (
        "def binary_search(items, target):\n"
        '    """Returns the index of target in the sorted list, or -1."""\n'
        "    low, high = 0, len(items) - 1\n    while low <= high:\n"),
    "cpp": (
        "#include <cstdint>\n#include <vector>\n\n"
        "// Returns the greatest common divisor.\n"
        "uint64_t Gcd(uint64_t a, uint64_t b) {\n"),
    "sql": (
        "CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT, total "
        "REAL);\n-- The ten customers who spent the most\nSELECT"),
    "json": (
        '{"users": [{"id": 1, "name": "Ada", "admin": true}, {"id": 2, '
        '"name": "Grace", "admin": false}, {"id": 3,'),
    "html": (
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n  <meta charset="),
    "german": (
        "Der Zug hatte bereits zwanzig Minuten Verspätung, als endlich die "
        "Durchsage kam:"),
    "french": (
        "Il était une fois, dans un petit village au bord de la mer, une "
        "vieille femme qui"),
    "spanish": "Las tres ciudades más grandes de España son",
    "russian": "Однажды зимним вечером старый учитель сидел у окна и",
    "chinese": "春节是中国最重要的传统节日。每年这个时候，人们",
    "japanese": "昔々、あるところに、おじいさんとおばあさんが",
    "arabic": "تقع مدينة القاهرة على ضفاف نهر",
    "hindi": "भारत एक विशाल देश है जहाँ",
    "emoji": "Weather today: ☀️🌤️⛅ Mood: 😀🎉👨‍👩‍👧‍👦 Food: 🍕🍣🥐 Travel: ✈️🚆",
    "arithmetic": "1 + 1 = 2\n2 + 2 = 4\n3 + 3 = 6\n4 + 4 = 8\n5 + 5 =",
}


def golden_prompts(metadata) -> dict[str, list[int]]:
    """Name -> token ids, beginning-of-sequence id first."""
    def ids(text: str) -> list[int]:
        return gguf_reference.tokenize(metadata, text)

    english = ids(gguf_reference.read_text("english")[1])
    technical = ids(gguf_reference.read_text("technical")[1])
    prompts = {name: ids(text) for name, text in _SHORT.items()}
    prompts["story-2300"] = english[:2300]
    prompts["guide-700"] = technical[:700]
    prompts["ledger"] = ids(_LEDGER)
    return prompts
