"""The corpus `cldr`: translation pairs in any two languages of Unicode's locale data (CLDR).

It needs no download. Babel formats the same date, interval, duration, amount, measure, name or list
in both languages, so each source has one correct translation. This makes a test bed, but not a
benchmark of machine translation. The texts depend on the version of Babel, so the version of the
corpus names it.
"""

import datetime
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any, NamedTuple

import babel
from babel import Locale, UnknownLocaleError, dates, lists, localedata, numbers, units

from qkattn.config import DataConfig
from qkattn.data.corpora.corpus import (
    SPLITS,
    Corpus,
    explain_read_errors,
    hash64,
    parse_languages,
    split_of,
)

VERSION = f'babel{babel.__version__}-1.0.0'
# Longer texts, which are fewer than 1 %, are left out.
MAX_BYTES = 120

# phrase(locale=...) formats one value in the language of the locale. Formatting both sides of a
# pair from one phrase makes the translation correct.
Phrase = Callable[..., str]
# The locales of the source and of the target.
Pair = tuple[Locale, Locale]

# Forms of dates and times, which CLDR calls widths and skeletons: 'yMMMd' is 'Jan 30, 1926'. Those
# with time zones are left out, and those with weeks of the year, which begin on different days.
WIDTHS = ('full', 'long', 'medium', 'short')
# fmt: off
SKELETONS = (
    'yMMMEd', 'yMMMd', 'yMMMM', 'yMMM', 'yQQQQ', 'yMEd', 'yMd', 'MMMEd', 'MMMMd', 'MMMd', 'MEd',
    'GyMMMEd', 'GyMMMd', 'Gy',
)
# fmt: on
TIME_WIDTHS = ('full', 'medium', 'short')
TIME_SKELETONS = ('EHm', 'EBhm', 'Ehm', 'Bhm', 'Bh', 'h')
INTERVALS = ('yMMMEd', 'yMMMd', 'yMMMM', 'yMEd', 'MMMEd', 'MMMd', 'MEd')
TIME_INTERVALS = ('Hm', 'hm', 'h', 'H')
# Seconds of a day.
DAY = 24 * 60 * 60
# Units from the second to the year: the seconds of each unit, and the largest amount of it that is
# not written in the next larger unit.
UNITS = (
    (1, 50),
    (60, 50),
    (60 * 60, 20),
    (DAY, 5),
    (7 * DAY, 3),
    (30.5 * DAY, 10),
    (365.25 * DAY, 99),
)
# Units of time by which measures are divided, as in 'miles per hour'.
RATES = ('duration-second', 'duration-minute', 'duration-hour', 'duration-day', 'duration-week')
# The kinds of measures that are divided by them.
RATED = ('length', 'volume', 'mass', 'energy', 'digital')


def _shared_keys(pair: Pair, field: str, among: Sequence[str] = ()) -> list[str]:
    """Returns the keys of a field of the locale data that both languages have.

    For example, the field 'currencies' gives 'AED', 'AFN' and so on. If `among` lists some keys,
    only these are returned, in their order. Otherwise all are returned, sorted.
    """
    source, target = pair
    source_keys = set(getattr(source, field))
    target_keys = set(getattr(target, field))
    shared = (source_keys & target_keys) - {None, ''}
    if not among:
        return sorted(shared)
    return [key for key in among if key in shared]


def _random_moment(rng: Random) -> datetime.datetime:
    """Draws a random second of the 200 years from 1900 on."""
    days = rng.randrange(200 * 365)
    seconds = rng.randrange(DAY)
    return datetime.datetime(1900, 1, 1) + datetime.timedelta(days=days, seconds=seconds)


# Two forms of a value may read alike in the source, but not in the target. `pairs` keeps the first
# one only. All forms of a value follow in the same order, so that the same form is kept for all
# values, and there is a rule to learn.
def _moments(
    count: int,
    format_moment: Callable[..., str],
    widths: Sequence[str],
    skeletons: Sequence[str],
    rng: Random,
    pair: Pair,
) -> Iterator[Phrase]:
    """Yields functions of a locale that write a random date or time, such as 'Jan 3, 1926'.

    There are `count` dates or times, each in all forms that both languages have.

    Args:
      count: the number of dates or times.
      format_moment: the function of Babel that formats a moment in one of the `widths`.
      widths: the general forms, such as 'long'.
      skeletons: the forms by parts, such as 'yMMMd' for a year, a short month and a day.
      rng: draws the moments.
      pair: the locales of source and target.
    """
    shared_skeletons = _shared_keys(pair, 'datetime_skeletons', skeletons)
    for _ in range(count):
        moment = _random_moment(rng)
        for width in widths:
            yield partial(format_moment, moment, width)
        for skeleton in shared_skeletons:
            yield partial(dates.format_skeleton, skeleton, moment)


def _intervals(rng: Random, pair: Pair) -> Iterator[Phrase]:
    """Yields functions of a locale that write an interval, 'Jan 3 – 10, 1926' or '3 – 5 PM'.

    An interval is one of days, or one of hours within a day.
    """
    skeletons = _shared_keys(pair, 'interval_formats', INTERVALS)
    time_skeletons = _shared_keys(pair, 'interval_formats', TIME_INTERVALS)
    for number in range(900):
        start = _random_moment(rng)

        # An interval of days: in turn, within a week, two months, or two years.
        days_below = (6, 60, 600)[number % 3]
        end = start + datetime.timedelta(days=rng.randrange(1, days_below))
        for skeleton in skeletons:
            yield partial(dates.format_interval, start.date(), end.date(), skeleton)

        # An interval of one to eight hours, unless it goes beyond midnight.
        end = start + datetime.timedelta(minutes=rng.randrange(60, 480))
        if end.date() == start.date():
            for skeleton in time_skeletons:
                yield partial(dates.format_interval, start, end, skeleton)


def _deltas(rng: Random, pair: Pair) -> Iterator[Phrase]:
    """Yields functions of a locale that write a duration, '3 weeks' or 'in 3 weeks'."""
    for seconds, largest_amount in UNITS:
        for amount in range(1, largest_amount + 1):
            delta = datetime.timedelta(seconds=amount * seconds)
            yield partial(dates.format_timedelta, delta)
            yield partial(dates.format_timedelta, delta, format='short')
            for signed in (delta, -delta):
                yield partial(dates.format_timedelta, signed, add_direction=True)


def _amounts(rng: Random, pair: Pair) -> Iterator[Phrase]:
    """Yields functions of a locale that write an amount of money, '12 euros' or '€12.34'.

    Every currency has 17 amounts with its name and 6 with its sign.
    """
    in_words = partial(numbers.format_currency, format_type='name', currency_digits=False)
    for currency in _shared_keys(pair, 'currencies'):
        yield partial(in_words, 1, currency)
        for _ in range(16):
            num_digits = rng.randrange(1, 7)
            amount = rng.randrange(2, 10**num_digits)
            yield partial(in_words, amount, currency)
        for _ in range(6):
            num_digits = rng.randrange(3, 9)
            cents = rng.randrange(10**num_digits)
            yield partial(numbers.format_currency, cents / 100, currency)


def _numbers(rng: Random, pair: Pair) -> Iterator[Phrase]:
    """Yields functions of a locale that write a random number: '1,234.56', '12.3%' or '1.2M'."""
    format_compact: Any = partial(numbers.format_compact_decimal, fraction_digits=1)
    # The forms of compact numbers that both languages have: 'short', '1.2M', and 'long'.
    widths = _shared_keys(pair, 'compact_decimal_formats')
    for _ in range(700):
        num_digits = rng.randrange(4, 13)
        number = rng.randrange(1, 10**num_digits)
        # With two decimals.
        yield partial(numbers.format_decimal, number / 100)
        # The last four digits as a percentage from 0 % to 999.9 %.
        last_digits = number % 10_000
        fraction = last_digits / 1000
        yield partial(numbers.format_percent, fraction, decimal_quantization=False)
        # In compact form.
        for width in widths:
            yield partial(format_compact, number, format_type=width)


def _random_measure(rng: Random, unit: str) -> Phrase:
    """Returns a function of a locale that writes a random measure in a unit, such as '3.5 miles'.

    The number is small, large, or has a decimal.
    """
    small = rng.randrange(1, 100)
    large = rng.randrange(1, 10**5)
    decimal = rng.randrange(99) / 10
    number = rng.choice((small, large, decimal))
    return partial(units.format_unit, number, unit)


def _units(rng: Random, pair: Pair) -> Iterator[Phrase]:
    """Yields functions of a locale that write a measure, '3 miles', or a rate, '3 miles per hour'.

    Every unit has measures. Only units of the kinds RATED, such as lengths, have rates.
    """
    for unit in _shared_keys(pair, 'unit_display_names'):
        measures: list[Phrase] = [partial(units.format_unit, 1, unit)]  # the singular
        for _ in range(23):
            measures.append(_random_measure(rng, unit))
        # All measures are written in the long form, '3 miles', and the first 8 also as '3 mi'.
        for number, measure in enumerate(measures):
            yield partial(measure, length='long')
            if number < 8:
                yield partial(measure, length='short')

        if unit.startswith(RATED):
            for rate in RATES:
                for _ in range(5):
                    amount = rng.randrange(1, 500)
                    yield partial(units.format_compound_unit, amount, unit, denominator_unit=rate)


def _names(rng: Random, pair: Pair) -> Iterator[Phrase]:
    """Yields functions of a locale that write a name, such as 'France' or 'Central European Time'.

    The names are those of countries, languages, currencies, scripts, locales and time zones.
    """
    for field in ('territories', 'languages', 'currencies', 'scripts', 'variants'):
        for key in _shared_keys(pair, field):
            yield partial(_write_name, field, key)
    for identifier in sorted(localedata.locale_identifiers()):
        yield partial(Locale.get_display_name, Locale.parse(identifier))
    for zone in _shared_keys(pair, 'meta_zones'):
        for kind in ('generic', 'standard', 'daylight'):
            yield partial(_write_zone_name, zone, kind)


def _write_name(field: str, key: str, locale: Locale) -> str:
    return getattr(locale, field)[key]


def _write_zone_name(zone: str, kind: str, locale: Locale) -> str:
    return locale.meta_zones[zone].get('long', {}).get(kind, '')


def _write_list(items: Sequence[Phrase], style: Any, locale: Locale) -> str:
    return lists.format_list([phrase(locale=locale) for phrase in items], style, locale)


def _lists(rng: Random, pair: Pair) -> Iterator[Phrase]:
    """Yields functions of a locale that write a list of names or of measures.

    A list has two to four names, 'Chad, France, or Peru', or two or three measures, '3 miles and 2
    hours'. Short lists are more frequent.
    """
    # 'standard' lists have the word 'and'.
    styles = _shared_keys(pair, 'list_patterns', ('standard', 'or'))
    for field, count in (('territories', 2600), ('languages', 2600), ('currencies', 1000)):
        keys = _shared_keys(pair, field)
        if len(keys) < 4:  # the locale data of some languages have hardly any names
            continue
        for _ in range(count):
            num_names = rng.choice((2, 2, 3, 3, 4))
            names = [partial(_write_name, field, key) for key in rng.sample(keys, num_names)]
            for style in styles:
                yield partial(_write_list, names, style)

    all_units = _shared_keys(pair, 'unit_display_names')
    for _ in range(2500):
        num_measures = rng.choice((2, 2, 3))
        measures = []
        for unit in rng.sample(all_units, num_measures):
            measures.append(partial(_random_measure(rng, unit), length='long'))
        yield partial(_write_list, measures, rng.choice(styles))


CATEGORIES: dict[str, Callable[[Random, Pair], Iterator[Phrase]]] = {
    'dates': partial(_moments, 800, dates.format_date, WIDTHS, SKELETONS),
    'times': partial(_moments, 600, dates.format_datetime, TIME_WIDTHS, TIME_SKELETONS),
    'intervals': _intervals,
    'deltas': _deltas,
    'amounts': _amounts,
    'numbers': _numbers,
    'units': _units,
    'names': _names,
    'lists': _lists,
}


def pairs(source_language: str, target_language: str) -> Iterator[tuple[str, str, str]]:
    """Yields all pairs of two languages as (category, source text, target text).

    A pair is left out if its texts are equal, if one of them is empty or has more than MAX_BYTES
    bytes, or if an earlier pair has the same source text.
    """
    source_locale = Locale.parse(source_language)
    target_locale = Locale.parse(target_language)

    def write(phrase: Phrase, locale: Locale) -> str:
        # Locale data has nine kinds of space that look alike.
        return re.sub(r'\s+', ' ', phrase(locale=locale) or '').strip()

    earlier_sources = set()
    for category, make_phrases in CATEGORIES.items():
        rng = Random(f'cldr {category}')
        for phrase in make_phrases(rng, (source_locale, target_locale)):
            source = write(phrase, source_locale)
            target = write(phrase, target_locale)
            if not source or not target or source == target:
                continue
            if source in earlier_sources:
                continue
            earlier_sources.add(source)
            longest = max(len(source.encode()), len(target.encode()))
            if longest <= MAX_BYTES:
                yield category, source, target


class _Row(NamedTuple):
    """A pair with its split. Sorting rows by the hash of the source mixes the categories."""

    split: str
    source_hash: int
    source: str
    target: str


# The cache serves the readers of a corpus, which read each side for the vocabulary and for tokens.
@functools.lru_cache(maxsize=1)
def _pairs_by_split(languages: tuple[str, str]) -> list[_Row]:
    """Returns all pairs of two languages, in the order of their splits and hashes.

    The source text decides the split: about 90 % of the pairs are in train, and about 5 % each in
    validation and test.
    """
    rows = []
    for _, source, target in pairs(*languages):
        split = split_of(source, train=90, validation=5)
        rows.append(_Row(split, hash64(source.encode()), source, target))
    return sorted(rows)


def corpus(config: DataConfig) -> Corpus:
    """Opens the corpus of two languages that Babel knows.

    Its texts are made when they are read. Raises ConfigError for other languages.
    """

    def babel_name(code: str) -> str:
        """Returns Babel's name of a language: 'EN' -> 'en', 'zh_CN' -> 'zh_Hans_CN'."""
        return str(Locale.parse(code))

    field = f'data.languages={config.languages!r}'
    advice = "name two of Babel's locales, such as en, de, fr, pt_BR or zh_Hans"
    # `Locale.parse` raises these errors for a language that Babel does not know.
    with explain_read_errors(field, advice, ValueError, UnknownLocaleError):
        languages = parse_languages(config, babel_name)
    source_language = languages[0]

    def documents(language: str | None) -> dict[str, list[bytes]]:
        """Returns the texts of one of the two languages, by split."""
        texts: dict[str, list[bytes]] = {split: [] for split in SPLITS}
        for row in _pairs_by_split(languages):
            text = row.source if language == source_language else row.target
            texts[row.split].append(text.encode())
        return texts

    return Corpus(
        name='-'.join(('cldr', *languages)),
        version=VERSION,
        languages=languages,
        splits=SPLITS,
        documents=documents,
    )
