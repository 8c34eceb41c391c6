"""qkattn: controlled ablations of attention's weight matrices at equal parameter count."""

__version__ = '0.1.0'
