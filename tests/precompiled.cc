// The target that owns tests/precompiled.h needs a source.
int main() {}
