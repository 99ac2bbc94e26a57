"""Where data lives: layout algebra, number formats, MMA fragments, packed layouts, pictures. Pure
Python and numpy."""

from .formats import QuantFormat
from .fragments import Fragment
from .layout import Layout
from .packing import PackedLayout, gemm_layout, induce
from .swizzle import Swizzle

__all__ = ["Fragment", "Layout", "PackedLayout", "QuantFormat", "Swizzle", "gemm_layout", "induce"]
