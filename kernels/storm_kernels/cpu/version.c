/* Placeholder so that the first build has a source. */
int storm_abi_version(void) { return 1; }
