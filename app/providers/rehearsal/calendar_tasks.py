"""Tasks about the calendar: how they are drawn, and how they are worked out from their text."""

from calendar import day_name, month_name
from datetime import date, timedelta
from random import Random

from app.providers.rehearsal.dates import all_dates
from app.providers.rehearsal.worked_task import Slots, WorkedTask

DATE = rf"\d{{1,2}} (?:{'|'.join(month_name[1:])}) \d{{4}}"


def draw_two(random: Random, level: int) -> Slots:
    """Draw two days of one month, of one year, or of two years."""
    year, month = random.randint(2001, 2040), random.randint(1, 11)
    first = date(year, month, random.randint(1, 14))
    if level == 0:
        second = first.replace(day=random.randint(15, 28))
    elif level == 1:
        second = date(year, random.randint(month + 1, 12), random.randint(1, 28))
    else:
        second = date(year + random.randint(1, 6), random.randint(1, 12), random.randint(1, 28))
    return {"a": _spell(first), "b": _spell(second)}


def count_days_between(slots: Slots) -> WorkedTask:
    """Return the days from the first to the second."""
    first, second = _date(slots["a"]), _date(slots["b"])
    days = (second - first).days
    level = 2 if first.year != second.year else int(first.month != second.month)
    return str(days), str(days + 1), level


def draw_one(random: Random, level: int) -> Slots:
    """Return a day of these years, of the last century, or of one long past."""
    year = random.randint(*((2020, 2029), (1900, 1999), (1600, 1799))[level])
    return {"a": _spell(date(year, random.randint(1, 12), random.randint(1, 28)))}


def weekday(slots: Slots) -> WorkedTask:
    """Return the day of the week."""
    day = _date(slots["a"])
    level = 2 if day.year < 1800 else int(day.year < 2000)
    return day_name[day.weekday()], day_name[(day.weekday() + 1) % 7], level


def draw_away(random: Random, level: int) -> Slots:
    """Return a day up to a month, a year or ten years later."""
    days = random.randint(*((2, 28), (40, 360), (400, 3_600))[level])
    return {"n": str(days), "a": _spell(date(random.randint(2001, 2040), random.randint(1, 12), random.randint(1, 28)))}


def add_days(slots: Slots) -> WorkedTask:
    """Return the date so many days later."""
    days = int(slots["n"])
    if days > 10_000:
        raise ValueError
    day = _date(slots["a"])
    level = (days > 28) + (days > 366)
    return _spell(day + timedelta(days)), _spell(day + timedelta(days + 1)), level


def _spell(day: date) -> str:
    return f"{day.day} {month_name[day.month]} {day.year}"


def _date(text: str) -> date:
    """Return the date. Raises ValueError for a day that there is not."""
    (day,) = all_dates(text.lower())
    return day
