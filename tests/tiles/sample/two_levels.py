"""A format whose scales have two levels, of integer codes: named by this module, so that worker processes know it, too."""

from tilebit.layouts.formats import PER_CHANNEL, GemmFormat, Numbers, Scale

FORMAT = GemmFormat(Numbers("uint", 4, (Scale(64, "stored"), Scale(PER_CHANNEL))), module="sample.two_levels")
