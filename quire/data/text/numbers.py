"""Words to digits, made by code: numbers and dates for translation, of which every case is known.

Each case belongs to a group, the number or the date itself, and no group is in two parts of the data: what
is tested was never seen in any form.
"""

from __future__ import annotations

import datetime

import numpy as np

ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
FIRST_DAY = datetime.date(1900, 1, 1)
LAST_DAY = datetime.date(2099, 12, 31)


def number_words(number: int) -> str:
    """342 → "three hundred forty-two", for 0 to 999999."""
    if not 0 <= number < 1_000_000:
        raise ValueError(f"{number} is not in 0 … 999999")
    if number < 20:
        return ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return TENS[tens - 2] + (f"-{ONES[ones]}" if ones else "")
    unit, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    many, rest = divmod(number, unit)
    return f"{number_words(many)} {name}" + (f" {number_words(rest)}" if rest else "")


def ordinal(number: int) -> str:
    """3 → "3rd"."""
    endings = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{'th' if number % 100 in (11, 12, 13) else endings.get(number % 10, 'th')}"


def date_forms(date: datetime.date) -> list[str]:
    """Ways to write a date that leave no doubt. A date in numbers has its day first, and only days that
    cannot be months are written so."""
    day, month, year = date.day, MONTHS[date.month - 1], date.year
    forms = [
        f"the {ordinal(day)} of {month}, {year}",
        f"{month} {day}, {year}",
        f"{day} {month} {year}",
        f"{month} {ordinal(day)}, {year}",
        f"{day}-{month[:3]}-{year}",
        f"{year}, {month} {day}",
    ]
    return [*forms, f"{day}/{date.month}/{year}"] if day > 12 else forms


def numbers(count: int = 9_999, digits: int = 4, seed: int = 0) -> list[tuple[str, str, str]]:
    """(words, digits, group) of `count` different numbers from 1 on of at most so many digits, as many of
    each length as there are or as are needed, in random order. Zero, a word by itself, is left out."""
    generator = np.random.default_rng(seed)
    chosen: list[int] = []
    for length in range(1, digits + 1):
        low, high = 10 ** (length - 1), 10**length
        wanted = min(high - low, (count - len(chosen)) // (digits + 1 - length))
        chosen += (generator.choice(high - low, wanted, replace=False) + low).tolist()
    order = generator.permutation(len(chosen))
    return [(number_words(chosen[i]), str(chosen[i]), str(chosen[i])) for i in order]


def dates(count: int = 9_999, seed: int = 0) -> list[tuple[str, str, str]]:
    """(date as people write it, YYYY-MM-DD, group) of `count` different days from 1900 to 2099, each in one
    way of writing it."""
    generator = np.random.default_rng(seed)
    days = generator.choice((LAST_DAY - FIRST_DAY).days + 1, count, replace=False)
    cases = []
    for day in days.tolist():
        date = FIRST_DAY + datetime.timedelta(days=day)
        forms = date_forms(date)
        cases.append((forms[int(generator.integers(len(forms)))], date.isoformat(), date.isoformat()))
    return cases
