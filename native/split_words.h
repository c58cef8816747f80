/* One plane of a frame of words of type WORD: split.c includes this for each type, and NAMED gives the functions their
 * names. */

/* A plane's bits, the lowest of a word. */
TN_INLINE WORD NAMED(cut)(WORD word, tn_split_plane by) {
    return (WORD)(((WORD)(word >> by.mantissa_down) & (WORD)by.mask) | ((WORD)(word >> by.sign_down) & (WORD)by.sign));
}

static void NAMED(split_plane)(const WORD *restrict words, int64_t count, const tn_split_plane *plane, uint8_t *restrict to) {
    const tn_split_plane by = *plane;
    const int share = 8 / by.bits;
    const int64_t row = (count + share - 1) / share;
    if (by.bits == 8 && by.sign == 0) {
        for (int64_t i = 0; i < row; i++) to[i] = (uint8_t)((WORD)(words[i] >> by.mantissa_down) & (WORD)by.mask);
        return;
    }
    if (by.bits == 4) {
        const WORD *from = words + row;
        to[row - 1] = (uint8_t)NAMED(cut)(words[row - 1], by);
        for (int64_t i = 0; i < count - row; i++) to[i] = (uint8_t)(NAMED(cut)(words[i], by) | (WORD)(NAMED(cut)(from[i], by) << 4));
        return;
    }
    for (int64_t i = 0; i < row; i++) to[i] = (uint8_t)NAMED(cut)(words[i], by);
    for (int place = 1; place < share; place++) {
        const WORD *from = words + place * row;
        const int64_t left = count - place * row < row ? count - place * row : row;
        for (int64_t i = 0; i < left; i++) to[i] |= (uint8_t)(NAMED(cut)(from[i], by) << place * by.bits);
    }
}
