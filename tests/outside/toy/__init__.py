"""A package that is not tilebit's: an operation (``scaled_add``) and a format (``nf4``), named by their modules."""
