// One matrix instruction, or several in a row along K, by inline PTX: d = dot(a, b) + c of eight cases a block.
//
// Every eight rows of the tile's A, and every eight columns of its B, are those of the eight cases, so that the results
// lie on the diagonal of each 8 x 8, and a scale is right wherever in its group the hardware looks for it.
// No header is included: NVRTC has none. `single.py` defines KIND; PTX, the instruction before its operands, and TAIL,
// what follows A, B, C; X, the registers of the accumulator; IS_HALF, that it is float16; IS_SCALED, E8M0 block scales;
// IDESC, the instruction descriptor of tcgen05.
//
// a, b [cases, bytes]: 32 bytes of K an instruction; scales [cases, bytes / 32]; c, d [cases]: codes in 32 bits.
#define MMA 0      // mma.sync: one warp
#define WGMMA 1    // A in registers, B in shared memory: one warpgroup
#define TCGEN05 2  // A, B in shared memory; accumulator and scales in tensor memory: one warpgroup
typedef unsigned u32;
typedef unsigned long long u64;
typedef const unsigned char* Bytes;

__device__ u32 word(Bytes bytes) { return *(const u32*)bytes; }
__device__ u32 shared(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// [PTX ISA, matrix descriptor] A tile of 8-row core matrices along K, without swizzle: 128 bytes to the next 16 of K, 256
// to the next eight rows, which WGMMA's B has not.
__device__ u64 descriptor(const void* tile) {
    const u64 rows = KIND == WGMMA ? 128 : 256, version = KIND == TCGEN05;
    return (shared(tile) >> 4 & 0x3fff) | (u64)(128 >> 4) << 16 | rows >> 4 << 32 | version << 46;
}
__device__ void store(u32* tile, Bytes cases, int bytes, int rows) {  // word by word: row, then 4 bytes of 32
    for (int i = threadIdx.x; i < rows * 8; i += blockDim.x) {
        int row = i / 8, at = i % 8;
        tile[row / 8 * 64 + at / 4 * 32 + row % 8 * 4 + at % 4] = word(cases + row % 8 * bytes + 4 * at);
    }
}

extern "C" __global__ void instruction(Bytes a, Bytes b, const u32* c, Bytes scale_a, Bytes scale_b, u32* d, int bytes) {
    const int first = 8 * blockIdx.x, lane = threadIdx.x % 32;
    a += first * bytes, b += first * bytes, c += first, d += first;
    scale_a += first * (bytes / 32), scale_b += first * (bytes / 32);
#if KIND != TCGEN05
    // [PTX ISA, fragments of m16n8k32] Lane 4 g + t: rows g and g + 8 of A, column g of B, at bytes 4 t and 16 + 4 t;
    // of C and D columns 2 t and 2 t + 1 of row g, then of row g + 8. A float16 accumulator holds two in a register.
    const int g = lane / 4, t = lane % 4;
    u32 x[4] = {c[2 * t], c[2 * t + 1], c[2 * t], c[2 * t + 1]};
    if (IS_HALF) x[0] = x[1] = x[0] | x[1] << 16;
    for (int k = 0; k < bytes; k += 32) {
        const u32 low = word(a + g * bytes + k + 4 * t), high = word(a + g * bytes + k + 4 * t + 16);
#if KIND == MMA
        const u32 left = word(b + g * bytes + k + 4 * t), right = word(b + g * bytes + k + 4 * t + 16);
        const int at = g * (bytes / 32) + k / 32;
        const u32 sa = IS_SCALED ? scale_a[at] * 0x01010101u : 0, sb = IS_SCALED ? scale_b[at] * 0x01010101u : 0;
        asm volatile(PTX X ", {%4,%4,%5,%5}, {%6,%7}, " X TAIL ";"
                     : "+r"(x[0]), "+r"(x[1]), "+r"(x[2]), "+r"(x[3])
                     : "r"(low), "r"(high), "r"(left), "r"(right), "r"(sa), "r"(sb), "h"((short)0));
#else
        __shared__ __align__(128) u32 tile[64];
        __syncthreads();
        store(tile, b + k, bytes, 8);
        asm volatile("fence.proxy.async;" ::: "memory");
        __syncthreads();
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        asm volatile("{.reg .pred p; setp.ne.u32 p, 1, 0;" PTX X ", {%4,%5,%6,%7}, %8, p, 1, 1" TAIL "; }"
                     : "+r"(x[0]), "+r"(x[1]), "+r"(x[2]), "+r"(x[3])
                     : "r"(low), "r"(low), "r"(high), "r"(high), "l"(descriptor(tile)) : "memory");
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#endif
    }
    if (threadIdx.x < 32 && t == g / 2) d[g] = IS_HALF ? x[0] >> 16 * (g % 2) & 0xffff : x[g % 2];
#else
    // Tensor memory: D in columns 0 to 15, a row a lane and a column a cell; scales of A from column 32 on, of B from 48:
    // row r in lane r % 32 of every quarter, column r / 32. Each thread writes its lane of its warp's quarter.
    __shared__ __align__(128) u32 tile_a[128 * 8], tile_b[16 * 8];
    __shared__ __align__(8) u64 barrier;
    __shared__ u32 base;
    if (threadIdx.x < 32) {
        asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 64;" ::"r"(shared(&base)) : "memory");
        asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
    }
    if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(&barrier)) : "memory");
    __syncthreads();
    const u32 mine = base + (threadIdx.x / 32 * 32 << 16);
    for (int i = 0; i < 16; i++)
        asm volatile("tcgen05.st.sync.aligned.32x32b.x1.b32 [%0], {%1};" ::"r"(mine + i), "r"(c[i % 8]) : "memory");
    for (int k = 0; k < bytes; k += 32) {
        store(tile_a, a + k, bytes, 128), store(tile_b, b + k, bytes, 16);
        for (int i = 0; IS_SCALED && i < 8; i++) {
            const u32 byte = (i < 4 ? scale_a : scale_b)[lane % 8 * (bytes / 32) + k / 32];
            asm volatile("tcgen05.st.sync.aligned.32x32b.x1.b32 [%0], {%1};"
                         ::"r"(mine + (i < 4 ? 32 : 44) + i), "r"(byte * 0x01010101u) : "memory");
        }
        asm volatile("tcgen05.wait::st.sync.aligned; fence.proxy.async; tcgen05.fence::before_thread_sync;" ::: "memory");
        __syncthreads();
        if (threadIdx.x == 0) {
            const u64 left = descriptor(tile_a), right = descriptor(tile_b);
            asm volatile("{.reg .pred p; tcgen05.fence::after_thread_sync; setp.ne.u32 p, 1, 0;" PTX " [%0], %1, %2, %3" TAIL
                         ", p; tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%6]; }"
                         ::"r"(base), "l"(left), "l"(right), "r"(IDESC), "r"(base + 32), "r"(base + 48),
                           "r"(shared(&barrier)) : "memory");
        }
        u32 done = 0;
        for (int tries = 0; !done; tries++) {
            if (tries == 1 << 24) __trap();  // an error, not a GPU that hangs
            asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                         : "=r"(done) : "r"(shared(&barrier)), "r"(k / 32 & 1) : "memory");
        }
        asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    }
    for (int i = 0; i < 8; i++) {
        u32 x;
        asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1]; tcgen05.wait::ld.sync.aligned;"
                     : "=r"(x) : "r"(mine + i) : "memory");
        if (threadIdx.x == i) d[i] = IS_HALF ? x & 0xffff : x;
    }
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
    __syncthreads();
    if (threadIdx.x < 32)
        asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 64;" ::"r"(base) : "memory");
#endif
}
