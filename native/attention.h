/* Attention inside a region. */
#ifndef TN_ATTENTION_H
#define TN_ATTENTION_H

#include "core.h"
#include "team.h"

/* The stage of a step's attention, and of an encoder's: all of its tasks, which the region's threads share. Takes about
 * 1.3 MiB of stack, of which heads of 128 numbers touch a quarter. */
void tn_attention_stage(const tn_attention_args *args, tn_region *region);
void tn_text_attention_stage(const tn_text_attention_args *args, tn_region *region);

#endif
