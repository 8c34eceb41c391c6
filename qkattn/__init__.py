"""qkattn: a laboratory for attention's weight matrices at equal total weight count."""

__version__ = '0.1.0'
