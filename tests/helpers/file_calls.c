/* Loaded before the C library (LD_PRELOAD), it writes down what a process does to the files below a folder, in order,
 * or lets such a call fail. It sees all calls, those of SQLite like those of Python.
 *
 *   FILE_CALLS_UNDER  the folder
 *   FILE_CALLS_LOG    the log: records of struct call, each followed by its bytes
 *   FILE_CALLS_FAIL   the number of the call from which on they fail, from 1
 *   FILE_CALLS_ERROR  the errno that they fail with: ENOSPC for what takes space, any other for whatever changes a file
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

struct call {
    int64_t what;  /* C creates, W writes, T sets the size, S syncs, R renames, U removes, M makes a folder */
    int64_t inode;
    int64_t at;  /* where W writes, the size that T sets */
    int64_t bytes;  /* that follow: what is written, or a path; R has two, with a zero after the first */
};

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static char under[PATH_MAX];
static size_t under_size;
static int log_fd = -1;
static long fail_from, fail_error, count;

#define REAL(name) (*(__typeof__(name) **)real(#name))

static void **real(const char *name) {
    static struct { const char *name; void *found; } known[64];
    for (int i = 0; i < 64; i++) {
        if (!known[i].name) {
            known[i].found = dlsym(RTLD_NEXT, name);
            known[i].name = name;
        }
        if (!strcmp(known[i].name, name)) return &known[i].found;
    }
    abort();
}

__attribute__((constructor)) static void begin(void) {
    const char *text = getenv("FILE_CALLS_UNDER");
    if (!text || !realpath(text, under)) return;
    under_size = strlen(under);
    if ((text = getenv("FILE_CALLS_LOG"))) log_fd = syscall(SYS_openat, AT_FDCWD, text, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if ((text = getenv("FILE_CALLS_FAIL"))) fail_from = atol(text);
    if ((text = getenv("FILE_CALLS_ERROR"))) fail_error = atol(text);
}

static int inside(const char *path) {
    return under_size && !strncmp(path, under, under_size) && path[under_size] == '/';
}

/* The path of a descriptor, if it is a file or folder below the folder. */
static int path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, PATH_MAX - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return inside(path);
}

/* The absolute path of a name, if it is below the folder; its own folder's links are followed. */
static int place_of(int folder, const char *name, char *path) {
    char given[2 * PATH_MAX], parent[PATH_MAX];
    if (!under_size || !name) return 0;
    if (name[0] == '/') {
        snprintf(given, sizeof given, "%s", name);
    } else {
        if (folder == AT_FDCWD) {
            if (!getcwd(parent, sizeof parent)) return 0;
        } else {
            char link[64];
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
            ssize_t size = readlink(link, parent, sizeof parent - 1);
            if (size < 0) return 0;
            parent[size] = 0;
        }
        snprintf(given, sizeof given, "%s/%s", parent, name);
    }
    char *last = strrchr(given, '/');
    *last = 0;
    if (!realpath(*given ? given : "/", parent)) return 0;
    if (snprintf(path, PATH_MAX, "%s/%s", parent, last + 1) >= PATH_MAX) return 0;
    return inside(path);
}

static int64_t inode_of(int fd) {
    struct stat found;
    return fstat(fd, &found) ? 0 : (int64_t)found.st_ino;
}

static void put(const void *data, size_t size) {
    while (size) {
        ssize_t done = syscall(SYS_write, log_fd, data, size);
        if (done < 0) abort();
        data = (const char *)data + done;
        size -= (size_t)done;
    }
}

static void note(char what, int64_t inode, int64_t at, const void *data, size_t size) {
    if (log_fd < 0) return;
    int kept = errno;
    struct call call = {what, inode, at, (int64_t)size};
    put(&call, sizeof call);
    put(data, size);
    errno = kept;
}

/* Whether this call is to fail. */
static int fails(int takes_space) {
    if (!fail_from || (fail_error == ENOSPC && !takes_space) || ++count < fail_from) return 0;
    errno = (int)fail_error;
    return 1;
}

#define LOCKED(result) do { pthread_mutex_unlock(&lock); return result; } while (0)

static int opened(int folder, const char *name, int flags, mode_t mode, int large) {
    char path[PATH_MAX];
    struct stat found;
    if ((flags & O_TMPFILE) == O_TMPFILE || !(flags & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR)) || !place_of(folder, name, path))
        return large ? REAL(openat64)(folder, name, flags, mode) : REAL(openat)(folder, name, flags, mode);
    pthread_mutex_lock(&lock);
    int there = !lstat(path, &found);
    if (((flags & O_CREAT && !there) || fail_error != ENOSPC) && fails(1)) LOCKED(-1);
    int fd = REAL(openat)(folder, name, flags, mode);
    if (fd >= 0 && flags & O_CREAT && !there) note('C', inode_of(fd), 0, path, strlen(path));
    else if (fd >= 0 && flags & O_TRUNC) note('T', inode_of(fd), 0, 0, 0);
    LOCKED(fd);
}

#define MODE mode_t mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); }

int open(const char *name, int flags, ...) { MODE return opened(AT_FDCWD, name, flags, mode, 0); }
int open64(const char *name, int flags, ...) { MODE return opened(AT_FDCWD, name, flags, mode, 1); }
int openat(int folder, const char *name, int flags, ...) { MODE return opened(folder, name, flags, mode, 0); }
int openat64(int folder, const char *name, int flags, ...) { MODE return opened(folder, name, flags, mode, 1); }

ssize_t write(int fd, const void *data, size_t size) {
    char path[PATH_MAX];
    if (!path_of(fd, path)) return REAL(write)(fd, data, size);
    pthread_mutex_lock(&lock);
    if (fails(1)) LOCKED(-1);
    ssize_t done = REAL(write)(fd, data, size);
    if (done > 0) note('W', inode_of(fd), lseek(fd, 0, SEEK_CUR) - done, data, (size_t)done);
    LOCKED(done);
}

static ssize_t written(int fd, const void *data, size_t size, off_t at) {
    char path[PATH_MAX];
    if (!path_of(fd, path)) return REAL(pwrite)(fd, data, size, at);
    pthread_mutex_lock(&lock);
    if (fails(1)) LOCKED(-1);
    ssize_t done = REAL(pwrite)(fd, data, size, at);
    if (done > 0) note('W', inode_of(fd), at, data, (size_t)done);
    LOCKED(done);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return written(fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { return written(fd, data, size, at); }

static int sized(int fd, off_t size) {
    char path[PATH_MAX];
    struct stat found;
    if (!path_of(fd, path)) return REAL(ftruncate)(fd, size);
    pthread_mutex_lock(&lock);
    if (fails(!fstat(fd, &found) && found.st_size < size)) LOCKED(-1);
    int result = REAL(ftruncate)(fd, size);
    if (!result) note('T', inode_of(fd), size, 0, 0);
    LOCKED(result);
}

int ftruncate(int fd, off_t size) { return sized(fd, size); }
int ftruncate64(int fd, off64_t size) { return sized(fd, size); }

static int synced(int fd) {
    char path[PATH_MAX];
    if (!under_size || (!path_of(fd, path) && strcmp(path, under))) return REAL(fsync)(fd);
    pthread_mutex_lock(&lock);
    if (fails(0)) LOCKED(-1);
    note('S', inode_of(fd), 0, path, strlen(path));  /* the disk itself is left alone: no machine fails here */
    LOCKED(0);
}

int fsync(int fd) { return synced(fd); }
int fdatasync(int fd) { return synced(fd); }

int renameat(int from, const char *old, int to, const char *new) {
    char paths[2 * PATH_MAX + 1], other[PATH_MAX];
    if (!place_of(from, old, paths) || !place_of(to, new, other)) return REAL(renameat)(from, old, to, new);
    pthread_mutex_lock(&lock);
    if (fails(0)) LOCKED(-1);
    int result = REAL(renameat)(from, old, to, new);
    size_t size = strlen(paths) + 1;
    strcpy(paths + size, other);
    if (!result) note('R', 0, 0, paths, size + strlen(other));
    LOCKED(result);
}

int rename(const char *old, const char *new) { return renameat(AT_FDCWD, old, AT_FDCWD, new); }

int unlinkat(int folder, const char *name, int flags) {
    char path[PATH_MAX];
    if (!place_of(folder, name, path)) return REAL(unlinkat)(folder, name, flags);
    pthread_mutex_lock(&lock);
    if (fails(0)) LOCKED(-1);
    int result = REAL(unlinkat)(folder, name, flags);
    if (!result) note('U', 0, 0, path, strlen(path));
    LOCKED(result);
}

int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

int mkdirat(int folder, const char *name, mode_t mode) {
    char path[PATH_MAX];
    if (!place_of(folder, name, path)) return REAL(mkdirat)(folder, name, mode);
    pthread_mutex_lock(&lock);
    if (fails(1)) LOCKED(-1);
    int result = REAL(mkdirat)(folder, name, mode);
    if (!result) note('M', 0, 0, path, strlen(path));
    LOCKED(result);
}

int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }
