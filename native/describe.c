/* What a library says of itself, for the caller to compare with its own declarations; and what it asks of the system. */
#define _GNU_SOURCE
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core.h"

#if !defined(TN_ISA)
#error "build_native.py defines TN_ISA, the name of the instruction set"
#endif

#define TEXT_(tokens) #tokens
#define TEXT(macro) TEXT_(macro)

#define STRUCTS(each)                                                                                        \
    each(tn_matrix) each(tn_linear_args) each(tn_decode_frames_args) each(tn_encode_frames_args) each(tn_fill_plane) each(tn_fill_segment) each(tn_fill_args) each(tn_coded_frame) each(tn_merged_frame) each(tn_copied_bytes) each(tn_walk_plane) each(tn_walk_segment) each(tn_walk_args) each(tn_split_plane) each(tn_split_args) \
    each(tn_vector) each(tn_embed_args) each(tn_norm_args) each(tn_activate_args)                            \
    each(tn_kv) each(tn_heads_args) each(tn_span) each(tn_save) each(tn_attention_args)                      \
    each(tn_distances) each(tn_text_attention_args) each(tn_part) each(tn_projection)                        \
    each(tn_expert) each(tn_decoder_layer) each(tn_decoder) each(tn_decoder_step_args) each(tn_encoder_layer) each(tn_encoder)\
    each(tn_encoder_step_args) each(tn_mean_args) each(tn_add_args) each(tn_match_args)                                                 \
    each(tn_adapter_part) each(tn_adapter_site) each(tn_adapter_layer) each(tn_adapter_run) each(tn_adapted_step_args)

#define FORMAT(name) "\n" #name " %zu"
#define SIZE(name) , sizeof(name)

const char *tn_describe(void) {
    static char text[2048]; /* each call writes the same */
    snprintf(text, sizeof text, "version " TEXT(TN_VERSION) "\nisa " TEXT(TN_ISA) STRUCTS(FORMAT) STRUCTS(SIZE));
    return text;
}

int tn_start(void) {
#if defined(__AMX_BF16__) && !defined(TN_SOFT_TILES)
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 ? TN_OK : TN_REFUSED;
#else
    return TN_OK;
#endif
}
