"""Translation pairs from Unicode's locale data (CLDR): no download, in any two of its languages.

Babel formats the same date, interval, delay, amount, measure, name or list in both languages, so
each source has one correct translation: a test bed, not a benchmark of machine translation. Texts
depend on Babel's version, which is therefore part of the corpus version.
"""

import datetime
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any

import babel
from babel import Locale, UnknownLocaleError, dates, lists, localedata, numbers, units

from qkattn.config import DataConfig
from qkattn.data.corpora.corpus import SPLITS, Corpus, hash64, parse_languages, readable, split_of

VERSION = f'babel{babel.__version__}-1.0.0'
MAX_BYTES = 120  # longer texts, fewer than 1 %, are left out

Phrase = Callable[..., str]  # phrase(locale=...) formats one value in its language
Pair = tuple[Locale, Locale]

# Without weeks of the year, which start on different days, and time zones.
WIDTHS = ('full', 'long', 'medium', 'short')
SKELETONS = (
    *('yMMMEd', 'yMMMd', 'yMMMM', 'yMMM', 'yQQQQ', 'yMEd', 'yMd', 'MMMEd', 'MMMMd', 'MMMd', 'MEd'),
    *('GyMMMEd', 'GyMMMd', 'Gy'),
)
TIME_WIDTHS = ('full', 'medium', 'short')
TIME_SKELETONS = ('EHm', 'EBhm', 'Ehm', 'Bhm', 'Bh', 'h')
INTERVALS = ('yMMMEd', 'yMMMd', 'yMMMM', 'yMEd', 'MMMEd', 'MMMd', 'MEd')
TIME_INTERVALS = ('Hm', 'hm', 'h', 'H')
# Units in seconds, from the second to the year, and amounts not written in the next larger unit.
DAY = 24 * 60 * 60
UNITS = (1, 60, 60 * 60, DAY, 7 * DAY, 30.5 * DAY, 365.25 * DAY)
AMOUNTS = (50, 50, 20, 5, 3, 10, 99)
RATES = ('duration-second', 'duration-minute', 'duration-hour', 'duration-day', 'duration-week')
RATED = ('length', 'volume', 'mass', 'energy', 'digital')


def _shared(pair: Pair, field: str, among: Sequence[str] = ()) -> list[str]:
    """Keys of a field that both languages have: those `among`, or all, sorted."""
    known = set.intersection(*(set(filter(None, getattr(side, field))) for side in pair))
    return [key for key in among or sorted(known) if key in known]


def _moment(rng: Random) -> datetime.datetime:
    return datetime.datetime(1900, 1, 1) + datetime.timedelta(
        days=rng.randrange(200 * 365), seconds=rng.randrange(DAY)
    )


# Every value is formatted in every form, one form after another: where two forms read alike in the
# source, the first gives the translation of all values, so that there is a rule to learn.
def _moments(
    count: int,
    formatted: Callable[..., str],
    widths: Sequence[str],
    skeletons: Sequence[str],
    rng: Random,
    pair: Pair,
) -> Iterator[Phrase]:
    known = _shared(pair, 'datetime_skeletons', skeletons)
    for _ in range(count):
        moment = _moment(rng)
        for width in widths:
            yield partial(formatted, moment, width)
        for skeleton in known:
            yield partial(dates.format_skeleton, skeleton, moment)


def _intervals(rng: Random, pair: Pair) -> Iterator[Phrase]:
    skeletons = _shared(pair, 'interval_formats', INTERVALS)
    time_skeletons = _shared(pair, 'interval_formats', TIME_INTERVALS)
    for number in range(900):
        start = _moment(rng)
        end = start + datetime.timedelta(days=rng.randrange(1, (6, 60, 600)[number % 3]))
        for skeleton in skeletons:
            yield partial(dates.format_interval, start.date(), end.date(), skeleton)
        end = start + datetime.timedelta(minutes=rng.randrange(60, 480))
        for skeleton in time_skeletons if end.date() == start.date() else ():
            yield partial(dates.format_interval, start, end, skeleton)


def _deltas(rng: Random, pair: Pair) -> Iterator[Phrase]:
    for seconds, most in zip(UNITS, AMOUNTS, strict=True):
        for amount in range(1, most + 1):
            delta = datetime.timedelta(seconds=amount * seconds)
            yield partial(dates.format_timedelta, delta)
            yield partial(dates.format_timedelta, delta, format='short')
            for signed in (delta, -delta):
                yield partial(dates.format_timedelta, signed, add_direction=True)


def _amounts(rng: Random, pair: Pair) -> Iterator[Phrase]:
    in_words = partial(numbers.format_currency, format_type='name', currency_digits=False)
    for currency in _shared(pair, 'currencies'):
        for amount in [1, *(rng.randrange(2, 10 ** rng.randrange(1, 7)) for _ in range(16))]:
            yield partial(in_words, amount, currency)
        for _ in range(6):
            cents = rng.randrange(10 ** rng.randrange(3, 9))
            yield partial(numbers.format_currency, cents / 100, currency)


def _numbers(rng: Random, pair: Pair) -> Iterator[Phrase]:
    compact: Any = partial(numbers.format_compact_decimal, fraction_digits=1)
    widths = _shared(pair, 'compact_decimal_formats')
    for _ in range(700):
        number = rng.randrange(1, 10 ** rng.randrange(4, 13))
        yield partial(numbers.format_decimal, number / 100)
        share = number % 10**4 / 1000
        yield partial(numbers.format_percent, share, decimal_quantization=False)
        for width in widths:
            yield partial(compact, number, format_type=width)


def _measure(rng: Random, unit: str) -> Phrase:
    number = rng.choice((rng.randrange(1, 100), rng.randrange(1, 10**5), rng.randrange(99) / 10))
    return partial(units.format_unit, number, unit)


def _units(rng: Random, pair: Pair) -> Iterator[Phrase]:
    for unit in _shared(pair, 'unit_display_names'):
        for number in range(24):
            phrase = _measure(rng, unit) if number else partial(units.format_unit, 1, unit)
            yield partial(phrase, length='long')
            if number < 8:
                yield partial(phrase, length='short')
        if unit.startswith(RATED):
            for rate in RATES:
                per = partial(units.format_compound_unit, denominator_unit=rate)
                for _ in range(5):
                    yield partial(per, rng.randrange(1, 500), unit)


def _names(rng: Random, pair: Pair) -> Iterator[Phrase]:
    for field in ('territories', 'languages', 'currencies', 'scripts', 'variants'):
        for key in _shared(pair, field):
            yield partial(_name, field, key)
    for identifier in sorted(localedata.locale_identifiers()):
        yield partial(Locale.get_display_name, Locale.parse(identifier))
    for zone in _shared(pair, 'meta_zones'):
        for kind in ('generic', 'standard', 'daylight'):
            yield partial(_zone_name, zone, kind)


def _name(field: str, key: str, locale: Locale) -> str:
    return getattr(locale, field)[key]


def _zone_name(zone: str, kind: str, locale: Locale) -> str:
    return locale.meta_zones[zone].get('long', {}).get(kind, '')


def _list(items: Sequence[Phrase], style: Any, locale: Locale) -> str:
    return lists.format_list([phrase(locale=locale) for phrase in items], style, locale)


def _lists(rng: Random, pair: Pair) -> Iterator[Phrase]:
    styles = _shared(pair, 'list_patterns', ('standard', 'or'))
    for field, count in (('territories', 2600), ('languages', 2600), ('currencies', 1000)):
        known = _shared(pair, field)
        # A few languages name next to nothing.
        for _ in range(count if len(known) >= 4 else 0):
            keys = rng.sample(known, rng.choice((2, 2, 3, 3, 4)))
            items = [partial(_name, field, key) for key in keys]
            for style in styles:
                yield partial(_list, items, style)
    known = _shared(pair, 'unit_display_names')
    for _ in range(2500):
        chosen = rng.sample(known, rng.choice((2, 2, 3)))
        items = [partial(_measure(rng, unit), length='long') for unit in chosen]
        yield partial(_list, items, rng.choice(styles))


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
    """Category, source text and target text; every source text once, none equal to its target."""
    locales = Locale.parse(source_language), Locale.parse(target_language)
    seen = set()
    for category, phrases in CATEGORIES.items():
        for phrase in phrases(Random(f'cldr {category}'), locales):
            # Locale data has nine kinds of space that look alike.
            source, target = (
                re.sub(r'\s+', ' ', phrase(locale=locale) or '').strip() for locale in locales
            )
            if not source or not target or source == target or source in seen:
                continue
            seen.add(source)
            if max(len(source.encode()), len(target.encode())) <= MAX_BYTES:
                yield category, source, target


# Each side is read for the vocabulary and again for its tokens.
@functools.lru_cache(maxsize=1)
def _ordered(languages: tuple[str, str]) -> list[tuple[str, int, str, str]]:
    """Split 90/5/5 by the source text, hash, which mixes the categories, source and target."""
    return sorted(
        (split_of(source, 90, 5), hash64(source.encode()), source, target)
        for _, source, target in pairs(*languages)
    )


def corpus(config: DataConfig) -> Corpus:
    """The corpus of a pair of languages that Babel knows; composed when it is read."""
    field = f'data.languages={config.languages!r}'
    advice = "name two of Babel's locales, such as en, de, fr, pt_BR or zh_Hans"
    with readable(field, advice, ValueError, UnknownLocaleError):
        # In Babel's own spelling, so that a language has one name.
        languages = parse_languages(config, lambda code: str(Locale.parse(code)))

    def documents(language: str | None) -> dict[str, list[bytes]]:
        side = 2 + languages.index(str(language))
        rows = _ordered(languages)
        return {s: [str(row[side]).encode() for row in rows if row[0] == s] for s in SPLITS}

    name = '-'.join(('cldr', *languages))
    return Corpus(
        name=name, version=VERSION, languages=languages, splits=SPLITS, documents=documents
    )
