"""Small tile programs that the tests compile, named by their module ("sample.w4a16")."""
