/* Code for an instruction set that the rest of the file is not compiled for, in the words of either compiler. */
#ifndef DCR_TARGETS_H
#define DCR_TARGETS_H

#define PRAGMA(text) _Pragma(#text)

#if defined(__clang__)
#define BEGIN_TARGET(features) PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define END_TARGET PRAGMA(clang attribute pop)
#define WIDEST_VECTORS ""
#else
#define BEGIN_TARGET(features) PRAGMA(GCC push_options) PRAGMA(GCC target(features))
#define END_TARGET PRAGMA(GCC pop_options)
#define WIDEST_VECTORS ",prefer-vector-width=512"
#endif

#endif
