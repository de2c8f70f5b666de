/* Makes recorded calls of the engine again, at every width: `replay FILE` prints what differs, and the widths.

   A record of words and bytes: function, bytes of its struct, pointers in it; the struct; and of each pointer its offset
   in the struct, its bytes, and what is there before and after the call. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"

static void *bytes_of(FILE *file, int64_t count) {
    void *bytes = malloc((size_t)count + 1);
    if (!bytes || fread(bytes, 1, (size_t)count, file) != (size_t)count) exit(2);
    return bytes;
}

int main(int count, char **arguments) {
    int differing = 0, calls = 0;
    for (int width = 0; count == 2 && f8_width_name(width); width++) {
        if (!f8_width_runs_here(width)) continue;
        FILE *file = fopen(arguments[1], "rb");
        if (!file) return 2;
        for (int64_t head[3]; fread(head, sizeof *head, 3, file) == 3; calls++) {
            char *call = bytes_of(file, head[1]), *memory[8], *after[8];
            int64_t where[8][2];
            for (int64_t i = 0; i < head[2]; i++) {
                if (fread(where[i], sizeof *where[i], 2, file) != 2) return 2;
                memory[i] = bytes_of(file, where[i][1]), after[i] = bytes_of(file, where[i][1]);
                memcpy(call + where[i][0], &memory[i], sizeof memory[i]);
            }
            int failed = head[0] ? f8_run_cast((f8_cast *)call, width) : f8_run((f8_gemm *)call, width);
            for (int64_t i = 0; i < head[2]; i++) {
                failed |= memcmp(memory[i], after[i], (size_t)where[i][1]);
                free(memory[i]), free(after[i]);
            }
            free(call);
            if (failed) printf("call %d differs at %s\n", calls, f8_width_name(width)), differing++;
        }
        fclose(file);
        printf("%s\n", f8_width_name(width));
    }
    printf("%d of %d calls differ\n", differing, calls);
    return differing || !calls;
}
