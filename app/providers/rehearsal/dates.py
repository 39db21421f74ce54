"""Questions about the calendar: days between dates, weekdays, dates some days away, leap years."""

import re
from calendar import day_name, isleap, month_name
from datetime import date, timedelta
from fractions import Fraction

from app.providers.rehearsal.solved_question import SolvedQuestion, solved_question, wrong_numbers_near

MONTHS = {name.lower(): number for number, name in enumerate(month_name) if name}
MONTHS |= {name[:3]: number for name, number in MONTHS.items()}
MONTH = "|".join(sorted(MONTHS, key=len, reverse=True))
DATE = re.compile(
    rf"(?P<y1>\d{{4}})-(?P<m1>\d\d)-(?P<d1>\d\d)"
    rf"|(?P<d2>\d{{1,2}})(?:st|nd|rd|th)?(?: of)? (?P<m2>{MONTH})\.?,? (?P<y2>\d{{4}})"
    rf"|(?P<m3>{MONTH})\.? (?P<d3>\d{{1,2}})(?:st|nd|rd|th)?,? (?P<y3>\d{{4}})"
)


def dates(text: str) -> SolvedQuestion | None:
    """One of the four kinds of question."""
    line = text.lower()
    try:
        day_list = all_dates(line)
    except ValueError:
        return None
    if len(day_list) == 2 and re.search(r"how many days", line):
        return _between(*day_list, whole="inclusive" in line)
    if len(day_list) == 1 and re.search(r"(?:what|which) (?:day of the week|weekday|day)", line):
        return _weekday(day_list[0])
    if len(day_list) == 1 and (match := re.search(r"(\d{1,5}) (day|week)s? (after|before|from)", line)):
        return _away(day_list[0], int(match.group(1)) * (7 if match.group(2) == "week" else 1), match.group(3))
    year = re.search(r"\b(\d{4})\b.*\bleap year|leap year.*\b(\d{4})\b", line)
    if year:
        right, other = ("yes", "no") if isleap(int(year.group(1) or year.group(2))) else ("no", "yes")
        return solved_question("dates", False, right, [other])
    return None


def all_dates(line: str) -> list[date]:
    """Return the dates in a line in lower case, in their order; ValueError for a day that there is not."""
    return [_date(match) for match in DATE.finditer(line)]


def _date(match: re.Match[str]) -> date:
    kind = next(number for number in "123" if match.group(f"y{number}"))
    month = match.group(f"m{kind}")
    return date(
        int(match.group(f"y{kind}")), int(month) if month.isdigit() else MONTHS[month], int(match.group(f"d{kind}"))
    )


def _between(first: date, second: date, *, whole: bool) -> SolvedQuestion:
    days = abs((second - first).days) + int(whole)
    hard = days > 62 or first.year != second.year
    return solved_question("dates", hard, f"{days} days", wrong_numbers_near(Fraction(days), " days"))


def _weekday(day: date) -> SolvedQuestion:
    names = list(day_name)
    wrong_days = [names[(day.weekday() + slip) % 7] for slip in (1, 6, 2, 5, 3)]
    return solved_question("dates", not 2020 <= day.year <= 2030, names[day.weekday()], wrong_days)


def _away(day: date, days: int, direction: str) -> SolvedQuestion | None:
    sign = -1 if direction == "before" else 1
    try:
        answers = [(day + timedelta(sign * days + slip)).isoformat() for slip in (0, 1, -1, 2, 30)]
    except OverflowError:
        return None
    return solved_question("dates", days > 30, answers[0], answers[1:])
