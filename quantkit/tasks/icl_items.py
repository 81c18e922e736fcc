"""A labelled task that no knowledge solves: words of categories, under labels drawn for the sample.

Each sample draws its categories, and which arbitrary word is whose label, so that a label can only
be learnt from the shots; the question's word is in none of them. A sample is a function of its
parameters and its index alone, on every version of Python and numpy (`calib_sets/draw.py`).

Many-shot classification, and its spread over orders of the demonstrations, as Ye et al. 2024,
"Differential Transformer" (arXiv 2410.05258), section 3.5; the task and the words are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from quantkit.calib_sets.draw import Draw
from quantkit.errors import InputError

LABELS: Final = (
    "alpha", "beta", "gamma", "delta", "sigma", "omega", "lambda", "theta", "north", "south",
    "east", "west", "one", "two", "three", "four",
)  # fmt: skip
"""Words that say nothing about any category."""
CATEGORIES: Final = {
    "animals": (
        "horse", "tiger", "rabbit", "elephant", "wolf", "monkey", "donkey", "bear", "lion", "goat",
        "camel", "mouse", "zebra", "giraffe", "fox", "deer", "sheep", "squirrel", "kangaroo",
        "otter", "badger", "leopard", "pig", "hedgehog",
    ),
    "cities": (
        "Paris", "London", "Berlin", "Madrid", "Tokyo", "Chicago", "Boston", "Vienna", "Moscow",
        "Rome", "Sydney", "Toronto", "Cairo", "Dublin", "Athens", "Lisbon", "Seattle", "Mumbai",
        "Shanghai", "Prague", "Warsaw", "Oslo", "Budapest", "Amsterdam",
    ),
    "body parts": (
        "elbow", "knee", "shoulder", "finger", "ankle", "wrist", "neck", "chin", "thumb", "nose",
        "ear", "forehead", "stomach", "toe", "eyebrow", "throat", "hip", "cheek", "tongue", "rib",
        "heel", "lip", "lung", "liver",
    ),
    "vehicles": (
        "car", "truck", "bus", "bicycle", "motorcycle", "train", "tram", "van", "helicopter",
        "airplane", "ferry", "taxi", "scooter", "tractor", "ambulance", "canoe", "yacht",
        "submarine", "limousine", "sled", "wagon", "rocket", "kayak", "minivan",
    ),
    "food": (
        "bread", "cheese", "soup", "pasta", "rice", "butter", "sausage", "pancake", "omelette",
        "pizza", "sandwich", "noodles", "cake", "biscuit", "pudding", "stew", "salad", "honey",
        "yogurt", "chocolate", "burger", "waffle", "jam", "pie",
    ),
    "jobs": (
        "doctor", "teacher", "lawyer", "plumber", "nurse", "carpenter", "pilot", "farmer", "baker",
        "dentist", "engineer", "painter", "butcher", "librarian", "electrician", "accountant",
        "journalist", "surgeon", "architect", "waiter", "tailor", "chemist", "soldier", "cashier",
    ),
    "colours": (
        "red", "blue", "green", "yellow", "purple", "brown", "black", "white", "pink", "grey",
        "violet", "crimson", "turquoise", "beige", "maroon", "scarlet", "indigo", "magenta",
        "cyan", "lilac", "teal", "azure", "tan", "navy",
    ),
    "clothes": (
        "shirt", "jacket", "trousers", "hat", "scarf", "sweater", "coat", "socks", "skirt",
        "dress", "gloves", "shoes", "jeans", "cap", "belt", "blouse", "boots", "vest", "pyjamas",
        "tie", "apron", "cardigan", "shorts", "sandals",
    ),
    "instruments": (
        "piano", "guitar", "violin", "trumpet", "flute", "drum", "cello", "harp", "clarinet",
        "saxophone", "trombone", "banjo", "accordion", "oboe", "tuba", "harmonica", "organ",
        "ukulele", "mandolin", "bassoon", "xylophone", "bagpipes", "tambourine", "lute",
    ),
    "furniture": (
        "table", "chair", "sofa", "bed", "desk", "bookcase", "wardrobe", "stool", "bench",
        "cupboard", "shelf", "armchair", "dresser", "couch", "cabinet", "mattress", "nightstand",
        "footstool", "sideboard", "crib", "hammock", "bunk", "ottoman", "recliner",
    ),
    "trees": (
        "oak", "pine", "birch", "willow", "maple", "cedar", "beech", "elm", "spruce", "poplar",
        "cypress", "fir", "sycamore", "redwood", "larch", "hawthorn", "eucalyptus", "mahogany",
        "yew", "juniper", "alder", "rowan", "hazel", "sequoia",
    ),
    "sports": (
        "football", "tennis", "basketball", "hockey", "swimming", "boxing", "cricket", "rugby",
        "golf", "baseball", "volleyball", "badminton", "rowing", "skiing", "wrestling", "archery",
        "gymnastics", "cycling", "surfing", "judo", "karate", "softball", "fencing", "polo",
    ),
    "countries": (
        "France", "Germany", "Spain", "Italy", "Japan", "China", "India", "Brazil", "Canada",
        "Mexico", "Egypt", "Kenya", "Norway", "Sweden", "Poland", "Greece", "Turkey", "Australia",
        "Argentina", "Peru", "Chile", "Vietnam", "Portugal", "Finland",
    ),
    "weather": (
        "rain", "snow", "wind", "fog", "hail", "thunder", "storm", "sunshine", "drizzle", "frost",
        "lightning", "blizzard", "hurricane", "tornado", "sleet", "cloud", "mist", "drought",
        "breeze", "heatwave", "typhoon", "monsoon", "gale", "downpour",
    ),
    "metals": (
        "iron", "gold", "silver", "copper", "zinc", "tin", "lead", "aluminium", "nickel",
        "platinum", "titanium", "steel", "bronze", "brass", "mercury", "cobalt", "chromium",
        "tungsten", "magnesium", "lithium", "uranium", "manganese", "palladium", "sodium",
    ),
    "family": (
        "mother", "father", "sister", "brother", "uncle", "aunt", "cousin", "grandmother",
        "grandfather", "nephew", "niece", "daughter", "son", "wife", "husband", "stepfather",
        "stepmother", "twin", "grandson", "granddaughter", "parent", "sibling", "spouse",
        "godmother",
    ),
}  # fmt: skip
"""Words of 16 categories, `_WORDS` each; none is in two."""
_WORDS: Final = 24


@dataclass(frozen=True, kw_only=True)
class IclItem:
    """A question with its shots, which every order permutes.

    Attributes:
        labels: The label words of this sample; `answer`: the index of the right one.
        shots: (word, label word) of each demonstration, in the order that was drawn.
        orders: Permutations of `range(len(shots))`.
    """

    labels: tuple[str, ...]
    shots: tuple[tuple[str, str], ...]
    orders: tuple[tuple[int, ...], ...]
    question: str
    answer: int

    def prompt(self, order: int) -> str:
        """Returns the text to be continued by a space and a label."""
        shown = (self.shots[index] for index in self.orders[order])
        return "".join(f"{word}: {label}\n" for word, label in shown) + f"{self.question}:"


def icl_item(index: int, *, seed: int = 0, labels: int, shots: int, orders: int) -> IclItem:
    """Returns sample `index` of the endless row.

    Classes take turns in the shots, as far as they go round; the question's is drawn. The words of
    a class are repeated when all have been shown, but the question's, which never is.

    Raises:
        InputError: numbers that no sample can have.
    """
    if not 2 <= labels <= len(LABELS) or shots < labels or orders < 1 or index < 0 or seed < 0:
        raise InputError(
            f"icl: expected 2 to {len(LABELS)} labels, a shot of each or more, 1 order or more; "
            f"got {labels} labels, {shots} shots, {orders} orders, sample {index}, seed {seed}."
        )
    draw = Draw(seed, index)
    names = list(CATEGORIES)
    chosen = [names[place] for place in draw.several(len(names), labels)]
    words = [[CATEGORIES[name][place] for place in _permuted(draw, _WORDS)] for name in chosen]
    own = tuple(LABELS[place] for place in draw.several(len(LABELS), labels))
    answer = draw.below(labels)
    question = words[answer].pop()
    shown = []
    for shot in range(shots):
        label, turn = shot % labels, shot // labels
        shown.append((words[label][turn % len(words[label])], own[label]))
    return IclItem(
        labels=own,
        shots=tuple(shown),
        orders=tuple(tuple(_permuted(draw, shots)) for _ in range(orders)),
        question=question,
        answer=answer,
    )


def _permuted(draw: Draw, count: int) -> list[int]:
    return draw.several(count, count)
