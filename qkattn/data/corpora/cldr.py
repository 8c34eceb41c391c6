"""The corpus `cldr`: translation pairs in any two languages of Unicode's locale data (CLDR).

No download is needed. Babel formats the same date, interval, duration, amount, measure, name or
list in both languages, so each source has one correct translation. The corpus is a test bed, not a
benchmark of machine translation. Its texts depend on the version of Babel.
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
# Longer texts are left out. They are fewer than 1 %.
MAX_BYTES = 120

# A value as a function of the locale: phrase(locale=...) writes it in that language.
Phrase = Callable[..., str]
# The source locale and the target locale.
Pair = tuple[Locale, Locale]

# CLDR's widths and skeletons of dates and times. For example, 'yMMMd' writes 'Jan 30, 1926'.
# Skeletons with time zones or weeks of the year are left out.
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
# Seconds per day.
DAY = 24 * 60 * 60
# Units from the second to the year: the seconds per unit, and the largest amount. Babel would write
# larger amounts in the next unit.
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
    """Returns the keys that a mapping of Babel has in both locales.

    For example, the field 'currencies' has keys such as 'EUR'. If `among` is given, only its keys
    are returned, in its order. Otherwise the keys are sorted.
    """
    source, target = pair
    source_keys = set(getattr(source, field))
    target_keys = set(getattr(target, field))
    shared = (source_keys & target_keys) - {None, ''}
    if not among:
        return sorted(shared)
    return [key for key in among if key in shared]


def _random_moment(rng: Random) -> datetime.datetime:
    """Draws a random second of the 200 years after 1900."""
    days = rng.randrange(200 * 365)
    seconds = rng.randrange(DAY)
    return datetime.datetime(1900, 1, 1) + datetime.timedelta(days=days, seconds=seconds)


# Each function below yields the forms of a value in a fixed order. Two forms may be equal in the
# source but not in the target. Then `pairs` keeps the first one, which is the same for all values.
def _moments(
    count: int,
    format_moment: Callable[..., str],
    widths: Sequence[str],
    skeletons: Sequence[str],
    rng: Random,
    pair: Pair,
) -> Iterator[Phrase]:
    """Yields random dates or times as functions of the locale, such as 'Jan 3, 1926'.

    Args:
        count: The number of dates or times. Each is written in all widths and skeletons.
        format_moment: The Babel function that writes a moment in a width.
        widths: CLDR's standard forms, such as 'long'.
        skeletons: CLDR's custom forms, such as 'yMMMd' for year, short month and day. Skeletons
            that one of the locales lacks are left out.
        rng: The random generator.
        pair: The source locale and the target locale.
    """
    shared_skeletons = _shared_keys(pair, 'datetime_skeletons', skeletons)
    for _ in range(count):
        moment = _random_moment(rng)
        for width in widths:
            yield partial(format_moment, moment, width)
        for skeleton in shared_skeletons:
            yield partial(dates.format_skeleton, skeleton, moment)


def _intervals(rng: Random, pair: Pair) -> Iterator[Phrase]:
    """Yields random intervals as functions of the locale, such as 'Jan 3 – 10, 1926'."""
    # Skeletons are CLDR's forms, such as 'yMMMd' for year, short month and day.
    date_skeletons = _shared_keys(pair, 'interval_formats', INTERVALS)
    time_skeletons = _shared_keys(pair, 'interval_formats', TIME_INTERVALS)
    for index in range(900):
        start = _random_moment(rng)

        days_below = (6, 60, 600)[index % 3]  # short, medium and long intervals take turns
        num_days = rng.randrange(1, days_below)
        end = start + datetime.timedelta(days=num_days)
        for skeleton in date_skeletons:
            yield partial(dates.format_interval, start.date(), end.date(), skeleton)

        num_minutes = rng.randrange(60, 480)
        end = start + datetime.timedelta(minutes=num_minutes)
        if end.date() == start.date():
            for skeleton in time_skeletons:
                yield partial(dates.format_interval, start, end, skeleton)


def _deltas(rng: Random, pair: Pair) -> Iterator[Phrase]:
    """Yields durations up to 99 years as functions of the locale, such as 'in 3 weeks'."""
    for seconds_per_unit, largest_amount in UNITS:
        for amount in range(1, largest_amount + 1):
            delta = datetime.timedelta(seconds=amount * seconds_per_unit)
            yield partial(dates.format_timedelta, delta)
            yield partial(dates.format_timedelta, delta, format='short')
            # 'in 3 weeks' and '3 weeks ago'.
            yield partial(dates.format_timedelta, delta, add_direction=True)
            yield partial(dates.format_timedelta, -delta, add_direction=True)


def _amounts(rng: Random, pair: Pair) -> Iterator[Phrase]:
    """Yields random amounts of money as functions of the locale, such as '12 euros' or '€12.34'.

    Each currency has 17 amounts with its name and 6 with its symbol.
    """
    format_with_symbol = numbers.format_currency
    format_with_name = partial(numbers.format_currency, format_type='name', currency_digits=False)
    for currency in _shared_keys(pair, 'currencies'):
        yield partial(format_with_name, 1, currency)
        for _ in range(16):
            num_digits = rng.randrange(1, 7)
            amount = rng.randrange(2, 10**num_digits)
            yield partial(format_with_name, amount, currency)
        for _ in range(6):
            num_digits = rng.randrange(3, 9)
            cents = rng.randrange(10**num_digits)
            yield partial(format_with_symbol, cents / 100, currency)


def _numbers(rng: Random, pair: Pair) -> Iterator[Phrase]:
    """Yields random numbers as functions of the locale, such as '1,234.56', '12.3%' or '1.2M'."""
    format_compact: Any = partial(numbers.format_compact_decimal, fraction_digits=1)
    compact_forms = _shared_keys(pair, 'compact_decimal_formats')  # 'short', 'long' or both
    for _ in range(700):
        num_digits = rng.randrange(4, 13)
        number = rng.randrange(1, 10**num_digits)
        yield partial(numbers.format_decimal, number / 100)

        fraction = number % 10_000 / 1000  # below 10, which is 1000 %
        yield partial(numbers.format_percent, fraction, decimal_quantization=False)

        for form in compact_forms:
            yield partial(format_compact, number, format_type=form)


def _random_measure(rng: Random, unit: str) -> Phrase:
    """Returns a random measure in a unit as a function of the locale, such as '3.5 miles'."""
    small = rng.randrange(1, 100)
    large = rng.randrange(1, 10**5)
    decimal = rng.randrange(99) / 10
    amount = rng.choice((small, large, decimal))
    return partial(units.format_unit, amount, unit)


def _units(rng: Random, pair: Pair) -> Iterator[Phrase]:
    """Yields random measures and rates as functions of the locale, such as '3 miles per hour'."""
    for unit in _shared_keys(pair, 'unit_display_names'):
        measures: list[Phrase] = [partial(units.format_unit, 1, unit)]  # the singular
        for _ in range(23):
            measures.append(_random_measure(rng, unit))
        for index, measure in enumerate(measures):
            yield partial(measure, length='long')  # '3 miles'
            if index < 8:
                yield partial(measure, length='short')  # '3 mi'

        if unit.startswith(RATED):  # such as 'length-mile'
            for time_unit in RATES:
                for _ in range(5):
                    amount = rng.randrange(1, 500)
                    yield partial(
                        units.format_compound_unit, amount, unit, denominator_unit=time_unit
                    )


def _names(rng: Random, pair: Pair) -> Iterator[Phrase]:
    """Yields names as functions of the locale, such as 'France' or 'Central European Time'."""
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
    texts = [phrase(locale=locale) for phrase in items]
    return lists.format_list(texts, style, locale)


def _lists(rng: Random, pair: Pair) -> Iterator[Phrase]:
    """Yields random lists as functions of the locale, such as 'Chad, France, or Peru'."""
    styles = _shared_keys(pair, 'list_patterns', among=('standard', 'or'))  # 'standard' is 'and'
    for field, count in (('territories', 2600), ('languages', 2600), ('currencies', 1000)):
        keys = _shared_keys(pair, field)
        if len(keys) < 4:  # some locales have few names
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
            measure = _random_measure(rng, unit)
            measures.append(partial(measure, length='long'))
        style = rng.choice(styles)
        yield partial(_write_list, measures, style)


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
    """Yields all translation pairs as (category, source text, target text).

    Each source text occurs once. Pairs with equal texts, an empty text, or a text of more than
    MAX_BYTES bytes are left out.
    """
    source_locale = Locale.parse(source_language)
    target_locale = Locale.parse(target_language)

    def write(phrase: Phrase, locale: Locale) -> str:
        text = phrase(locale=locale) or ''
        # CLDR uses nine kinds of space that look alike.
        return re.sub(r'\s+', ' ', text).strip()

    earlier_sources = set()
    for category, make_phrases in CATEGORIES.items():
        rng = Random(f'cldr {category}')
        # A phrase is a value, such as a date, that can be written in both languages.
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
    """A translation pair. Sorting rows by split and hash shuffles the pairs of each split."""

    split: str
    source_hash: int
    source: str
    target: str


# A corpus is read several times, for its vocabulary and its tokens.
@functools.lru_cache(maxsize=1)
def _pairs_by_split(languages: tuple[str, str]) -> list[_Row]:
    """Returns all translation pairs of two languages, sorted by split and hash.

    About 90 % of the pairs are in train, and about 5 % each in validation and test.
    """
    rows = []
    for _, source, target in pairs(*languages):
        split = split_of(source, train=90, validation=5)
        source_hash = hash64(source.encode())
        rows.append(_Row(split, source_hash, source, target))
    return sorted(rows)


def corpus(config: DataConfig) -> Corpus:
    """Opens the corpus 'cldr' in the two languages of `config.languages`.

    Raises ConfigError for languages that Babel does not know.
    """

    def babel_name(code: str) -> str:
        """Returns Babel's name of a language: 'EN' -> 'en', 'zh_CN' -> 'zh_Hans_CN'."""
        return str(Locale.parse(code))

    field = f'data.languages={config.languages!r}'
    advice = "name two of Babel's locales, such as en, de, fr, pt_BR or zh_Hans"
    # `Locale.parse` raises ValueError or UnknownLocaleError for unknown languages.
    with explain_read_errors(field, advice, ValueError, UnknownLocaleError):
        languages = parse_languages(config, normalize=babel_name)
    source_language = languages[0]

    def documents(language: str | None) -> dict[str, list[bytes]]:
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
